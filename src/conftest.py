"""For doctests of single files. pytest runs a module once more where its package, on its way, has imported it already.

So all that registers itself is imported before, as users import it; else there would be two parts of one name.
"""

import gossamer.bench.workloads  # pyright: ignore[reportUnusedImport]
import gossamer.recipes  # noqa: F401  # pyright: ignore[reportUnusedImport]

collect_ignore = ["gossamer/trainers/accelerate.py"]  # it imports what warns, and slowly
