"""The record on disk while a trial runs: from the first step on, every few seconds, and whatever the disk says."""

from pathlib import Path

import pytest

from gossamer.bench.compare.journal import PAUSE, SHARE, Journal
from gossamer.bench.record import Record, Run, Step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("gossamer.bench.compare.journal.monotonic", clock)
    return clock


class Writer:
    """A record whose steps are learned one by one, and its journal."""

    def __init__(self, path: Path | None) -> None:
        self.run = Run("a", "bf16")
        record = Record("a command", "", "ridge", "", "loss", True, 1, 2, "unshaped", 0, runs=[self.run])
        self.path, self.journal = path, Journal(record, path)

    def step(self) -> str:
        self.run.steps.append(Step(len(self.run.steps) + 1, 0.1, 2.0, 10))
        return self.journal.keep_up()

    def on_disk(self) -> int:
        assert self.path is not None
        return len(Record.read(self.path).runs[0].steps)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "record.json")


def test_what_was_there_stands_until_the_first_step(writer: Writer, clock: Clock) -> None:
    assert writer.path is not None
    earlier = '{"command": "gossamer train", and so on'
    writer.path.write_text(earlier)
    assert writer.journal.keep_up() == ""
    assert writer.path.read_text() == earlier
    writer.step()
    assert writer.on_disk() == 1


def test_it_is_written_every_few_seconds(writer: Writer, clock: Clock) -> None:
    found = []
    for _ in range(5):
        writer.step()
        found.append(writer.on_disk())
        clock.now += PAUSE / 2
    assert found == [1, 1, 3, 3, 5]


def test_a_record_that_takes_long_to_write_is_written_less_often(
    writer: Writer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []

    def slowly(record: Record, path: Path) -> None:
        written.append(clock.now)
        clock.now += 1.0

    monkeypatch.setattr(Record, "write", slowly)
    for _ in range(2000):
        writer.step()
        clock.now += 0.1
    spent, between = 1.0, written[1] - written[0]
    assert len(written) > 1
    assert spent / between <= SHARE


def test_a_full_disk_is_told_once_and_tried_again(
    writer: Writer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    assert writer.step() == ""
    told = []
    with monkeypatch.context() as disk:
        disk.setattr("os.replace", full)
        for _ in range(3):
            clock.now += PAUSE
            told.append(writer.step())
    assert told == ["No space left on device", "", ""]
    assert writer.on_disk() == 1
    clock.now += PAUSE
    assert writer.step() == ""
    assert writer.on_disk() == 5


def test_without_a_path_nothing_is_written(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "write", lambda *args: pytest.fail("it was"))
    assert Writer(None).step() == ""
