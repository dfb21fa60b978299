"""Parts and workloads of somebody's own: named by --import, or offered by a package that is installed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.record import Record

Say = Callable[..., tuple[int, str, str]]

MINE = '''
from typing import ClassVar, final
import torch
from torch import nn
from gossamer.core.contracts import Memory
from gossamer.core.parts import part
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.exchanges import Scatter
from gossamer.codecs import QSGD
from gossamer.bench.workloads import Batch, Data, Workload, workload

@final
@workload("parity")
class Parity(Workload):
    summary: ClassVar[str] = "is the number of ones odd"
    metric: ClassVar[str] = "held-out loss"
    lower_is_better: ClassVar[bool] = True
    group: ClassVar[str] = "label"
    batch_size: int = 8

    def load(self):
        bits = torch.randint(2, (512, 8), generator=torch.Generator().manual_seed(self.seed))
        x, y = bits.float(), bits.sum(1) % 2
        return Data((x[:400], y[:400]), (x[400:], y[400:]), y[:400])

    def network(self):
        return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model):
        with torch.no_grad():
            return float(self.loss(model, self.data.held))

@preset
def two_bits() -> Recipe:
    """Two bits for everybody."""
    return Recipe(Scatter(QSGD(2)))
'''


@pytest.mark.gang
def test_a_stranger_s_file_trains_and_goes_on_and_its_report_knows(shell: Shell) -> None:
    (shell.folder / "mine.py").write_text(MINE)
    words = ("train", "two_bits", "--workload", "parity", "--hosts", "2", "--out", "x")
    code, out, err = shell.run(*words, "--steps", "4", "--import", "mine.py")
    assert code == 0, out + err
    code, out, err = shell.run(*words, "--steps", "8", "--resume")  # the record remembers
    assert code == 0, out + err
    record = Record.read(shell.folder / "x" / "record.json")
    assert record.imports == [str(shell.folder / "mine.py")]
    assert (record.workload, record.runs[0].done) == ("parity", 8)
    code, out, _ = shell.run("report", "x", "--markdown")
    assert (code, "Is the number of ones odd" in out) == (0, True)


def package(folder: Path, name: str, source: str) -> None:
    """As pip leaves one behind."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-for-gossamer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gossamer.parts]\nall = {name}\n")


def test_what_installed_packages_offer_is_found_and_a_broken_one_is_a_warning(shell: Shell) -> None:
    package(shell.folder, "offered", MINE)
    package(shell.folder, "broken", "import no_such_module\n")
    shell.environment["PYTHONPATH"] += f":{shell.folder}"
    code, out, err = shell.run("recipes", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert code == 0
    assert rows["two_bits"]["origin"] == "offered-for-gossamer"
    assert "origin" not in rows["qsgd"]
    assert "broken-for-gossamer offers broken to gossamer, which cannot be loaded: ModuleNotFoundError" in err
    assert "no_such_module" in err
    program = "import gossamer; print(gossamer.Recipe.of('two_bits'))"
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=shell.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "scatter(qsgd(bits=2))\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module' ({file}, line 1)"),
        ("def f(:", "SyntaxError"),
        ("x = 1\ny = x / 0", "ZeroDivisionError: division by zero ({file}, line 2)"),
        ("raise SystemExit(3)", "SystemExit: 3 ({file}, line 1)"),
        ("x = 1", "registers no part, no preset and no workload"),
        (
            "from gossamer.bench.workloads import Workload, workload\n@workload('lm')\nclass Mine(Workload): ...",
            "ValueError: two workloads are called 'lm' ({file}, line 2)",
        ),
    ],
)
@pytest.mark.parametrize("command", ["compare", "recipes", "tune"])
def test_what_cannot_be_imported_is_said_and_nothing_is_touched(
    say: Say, tmp_path: Path, command: str, source: str, why: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    code, out, err = say(command, "qsgd", *(() if command == "recipes" else ("--out", "x")), "--import", "mine.py")
    assert (code, out) == (2, "")
    assert why.format(file=file) in err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py"]


def test_a_file_that_is_not_there_is_named(say: Say) -> None:
    code, _, err = say("recipes", "--import", "nowhere.py")
    assert (code, "nowhere.py cannot be imported" in err, "no such file" in err) == (2, True, True)
