"""The record on disk while a trial runs: a command that is killed, or a power cut, costs seconds of it."""

from pathlib import Path
from time import monotonic

from gossamer.bench.record import Record

PAUSE = 3.0  # seconds between two writings
SHARE = 0.01  # of the time, at most: a record grows, and what writes it takes a core from the ranks


class Journal:
    """Writes a record that grows to a file (None: to none), again and again."""

    def __init__(self, record: Record, path: Path | None, earlier: Record | None = None) -> None:
        self.record, self.path, self.earlier = record, path, earlier  # what other seeds have left, which is kept
        self.due, self.trouble = 0.0, ""

    def keep_up(self) -> str:
        """Write what there is, if it is time; returns why that could not be, the first time, or nothing.

        Before the first step there is nothing to lose, and perhaps an earlier record in its place.
        """
        began = monotonic()
        if self.path is None or began < self.due or not self.record.has_begun:
            return ""
        before, self.trouble = self.trouble, self._write(self.path)
        now = monotonic()
        self.due = now + max(PAUSE, (now - began) / SHARE)
        return self.trouble if self.trouble != before else ""

    def _write(self, path: Path) -> str:
        try:
            (self.earlier.with_again(self.record) if self.earlier else self.record).write(path)
        except OSError as error:
            return error.strerror or str(error)
        return ""
