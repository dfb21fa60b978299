"""`gossamer compare --seeds`: one record of all seeds, whatever becomes of them."""

from pathlib import Path
from typing import Any

import pytest
from tests.bench.report.test_numbers import record, run

from gossamer.bench import cli
from gossamer.bench.cli import compare as command
from gossamer.bench.compare import ComparePlan
from gossamer.bench.record import Record

Launched = list[tuple[ComparePlan, Record | None]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Stands in the place of ranks: each seed is a tenth slower than the one before; the third one is interrupted."""
    seen: Launched = []

    def launch(
        plan: ComparePlan, hosts: int, rate: Any, command: str, show: Any, path: Path, earlier: Record | None
    ) -> Any:
        seen.append((plan, earlier))
        k = len(seen)
        made = record([run("ddp", (k * 50, 5.0), (k * 100, 4.0)), run("qsgd", (k * 10, 5.0), (k * 20, 4.0))])
        made.seed, made.command = plan.seed, command
        if k == 3:
            made.runs[1].status = "interrupted"
        return made, 130 if k == 3 else 0

    monkeypatch.setattr(command, "launch", launch)
    return seen


def compare(folder: Path, *more: str) -> int:
    said = ["gossamer", "compare", "ddp", "qsgd", "--workload", "ridge", "--out", str(folder), *more]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", said)
        return cli.main()


def test_seeds_follow_one_another_and_end_in_one_record(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path / "x", "--seed", "4", "--seeds", "2") == 0
    assert [(p.seed, e and list(e.trials)) for p, e in launched] == [(4, None), (5, [4])]
    assert list(Record.read(tmp_path / "x" / "record.json").trials) == [4, 5]
    said = capsys.readouterr()
    assert "seeds 4 and 5" in said.out
    assert "0.20 [0.20, 0.20]" in said.out
    assert "seed 5, 2 of 2" in said.out + said.err


def test_a_seed_that_was_interrupted_ends_it_and_does_not_count(launched: Launched, tmp_path: Path) -> None:
    assert compare(tmp_path / "x", "--seeds", "9") == 130
    kept = Record.read(tmp_path / "x" / "record.json")
    assert ([a.seed for a in kept.again], list(kept.trials)) == ([1, 2], [0, 1])
    assert "seeds 0 and 1" in (tmp_path / "x" / "report.html").read_text()


@pytest.mark.parametrize(("args", "code"), [((), 130), ((15,), 143)])
def test_an_interrupt_between_two_seeds_keeps_those_that_are_over(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[int, ...], code: int
) -> None:
    first = command.launch

    def launch(*given: Any) -> Any:
        if launched:
            raise KeyboardInterrupt(*args)
        return first(*given)

    monkeypatch.setattr(command, "launch", launch)
    assert compare(tmp_path / "x", "--seeds", "3") == code
    kept = Record.read(tmp_path / "x" / "record.json")
    assert (list(kept.trials), [run.status for run in kept.runs]) == ([0], ["ok", "ok"])
    assert (tmp_path / "x" / "report.html").exists()


def test_no_seed_is_no_comparison(launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path / "x", "--seeds", "0") == 2
    assert (launched, (tmp_path / "x").exists()) == ([], False)
    assert "--seeds" in capsys.readouterr().err
