"""`benchmarks/auto.py` goes on where it was cut off, and takes no record of a killed command for a whole one."""

from pathlib import Path

from benchmarks.auto import whole

from gossamer.bench.record import Record, Run, Status, Step


def test_a_record_that_was_cut_off_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert whole(path) is None
    statuses: list[Status] = ["interrupted", "failed", "ok"]
    for status in statuses:
        runs = [Run("ddp", "ddp", "ok", steps=[Step(1, 0.5, 1.0, None)]), Run("bf16", "bf16", status)]
        Record("gossamer compare", "", "lm", "", "loss", True, 1, 2, "50mbit", 0, runs=runs).write(path)
        known = whole(path)
        assert (known is not None) == (status == "ok")
    path.write_text("{")
    assert whole(path) is None
