"""The house itself: who may touch the network, and what the package shows to the outside."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer

SOURCE = Path(gossamer.__file__).parent
MAY_TOUCH_THE_NETWORK = {"fabrics", "integrations", "trial", "cli"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return names


def test_algorithms_never_touch_torch_distributed_and_nothing_is_pickled() -> None:
    """But DCP pickles its metadata, which one module reads with nothing that it could run."""
    for path in modules():
        place, names = path.relative_to(SOURCE), imported(path)
        touches = any(n == "torch.distributed" or n.startswith("torch.distributed.") for n in names)
        assert not touches or place.parts[0] in MAY_TOUCH_THE_NETWORK, place
        reads_dcp = place.as_posix() == "integrations/dcp_reader.py"
        assert not names & {"pickle", "cloudpickle", "dill"} - ({"pickle"} if reads_dcp else set()), place
        assert "all_gather_object" not in path.read_text(), place


LAZY = """
import sys
import gossamer
assert "torch" not in sys.modules
assert set(gossamer.__all__) <= set(dir(gossamer))
from gossamer import GossamerError, attach, recipes
assert recipes.__name__ == "gossamer.recipes"
for name in gossamer.__all__:
    assert getattr(gossamer, name) is not None
from gossamer import *
assert (Recipe, ddp) == (gossamer.Recipe, gossamer.ddp)
"""


def test_every_public_name_exists_and_torch_is_not_loaded_before_one_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_parts_by_themselves_can_be_given_to_pytest() -> None:
    files = [str(Path("src/gossamer") / each) for each in ("schedules/slowmo.py", "codecs/qsgd.py")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files]
    home = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert all(f"{each}::" in done.stdout for each in files), done.stdout


def test_another_name_is_told_to_be_missing() -> None:
    with pytest.raises(AttributeError, match="module 'gossamer' has no attribute 'atach'"):
        gossamer.atach  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'atach'"):
        from gossamer import atach  # type: ignore[attr-defined]  # noqa: F401
