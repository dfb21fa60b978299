"""Processes that carry a mark in their environment: what they start inherits it, and is found by it."""

import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# For commands that train: see tests/lean/sitecustomize.py.
LEAN = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in ("tests/lean", "src"))
PATIENCE = 300.0  # seconds after which what waits is taken to hang: a busy machine must not come near it
SLACK = 8.0  # seconds by which other work on the machine may delay what is done at once


class Marked:
    """A fresh mark, and a look at who carries it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.label = {"GOSSAMER_TEST_MARK": self.mark}

    def processes(self) -> dict[int, str]:
        """Those that live: process id to command line."""
        found: dict[int, str] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = words.decode(errors="replace")
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def expect(self, count: int, within: float = PATIENCE) -> None:
        """Wait until there are so many; one that is just beginning shows no mark for a moment."""
        wait_for(lambda: len(self.processes()) >= count, within, lambda: str(self.processes()))

    def expect_nothing(self, within: float = 40.0) -> None:
        """Wait until nothing is left; fail if something stays. By itself it would end after a minute, in most tests."""
        wait_for(lambda: not self.processes(), within, lambda: str(self.processes()))

    def end(self) -> None:
        """Kill what is left, after a failure."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)


def wait_for(ready: Callable[[], Any], within: float = PATIENCE, what: Callable[[], str] = str) -> Any:
    """The first answer that is not empty."""
    deadline = time.monotonic() + within
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"waited {within} s: {what()}"
        time.sleep(0.02)
    return answer
