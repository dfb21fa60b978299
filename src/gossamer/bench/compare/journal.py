"""Write the record to disk while a comparison runs, so that a killed command loses seconds only."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

from gossamer.bench.record import Record

PAUSE = 3.0  # seconds between two writes
SHARE = 0.01  # of the time, at most: a record grows, and writing it takes a core from the ranks


class Journal:
    """Writes a growing record to a file every few seconds; does nothing if the path is None."""

    def __init__(self, record: Record, path: Path | None, earlier: Record | None = None) -> None:
        self.record, self.path, self.earlier = record, path, earlier  # runs of earlier seeds, which are kept
        self.due, self.trouble = 0.0, ""

    def keep_up(self, prepare: Callable[[], object] = lambda: None) -> str:
        """Write the record if it is due, after `prepare`; return why that failed, the first time, or an empty string.

        Nothing is written before the first step, since an earlier record may lie at the same path.
        """
        began = monotonic()
        if self.path is None or began < self.due or not self.record.has_begun:
            return ""
        prepare()
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
