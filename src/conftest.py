"""For doctests of single files. pytest runs a module once more where its package, on its way, has imported it already.

So all that registers itself is imported before, as users import it; else there would be two parts of one name.
"""

import gossamer.bench.workloads  # pyright: ignore[reportUnusedImport]
import gossamer.recipes  # noqa: F401  # pyright: ignore[reportUnusedImport]

# Adapters import frameworks that warn, and slowly; tests/trainers runs them in processes of their own.
collect_ignore = [f"gossamer/trainers/{name}.py" for name in ("accelerate", "fabric", "hf", "lightning")]
