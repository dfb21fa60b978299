"""What the lab's tests share: a lab or a reason to skip, and a look at what a lab might leave behind."""

import os
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.lab import LabResult, available, run_lab

PROGRAMS = Path(__file__).parent / "programs"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a lab where none can be made, and say why."""
    reason = available()
    for item in items:
        if reason is not None and item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def run() -> Callable[..., tuple[LabResult, list[list[str]]]]:
    """Run a command, or a program from `programs/`, in a lab; return the result and each host's lines."""

    def run(hosts: int, rates: str | None, *command: str, **more: object) -> tuple[LabResult, list[list[str]]]:
        lines: list[list[str]] = [[] for _ in range(hosts)]
        if command[0].endswith(".py"):
            command = (sys.executable, str(PROGRAMS / command[0]), *command[1:])
        options: dict[str, object] = {"timeout": 50, "on_line": lambda rank, line: lines[rank].append(line)}
        return run_lab(hosts, rates, command, **(options | more)), lines  # type: ignore[arg-type]

    return run


class Traces:
    """Processes that carry a mark in their environment: a lab and all that it started inherit it."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.devices = self._devices()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LAB_TEST_MARK": self.mark}

    def _devices(self) -> set[str]:
        names = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
        named = Path("/run/netns")
        return names | ({str(path) for path in named.iterdir()} if named.exists() else set())

    def processes(self) -> dict[int, str]:
        """Return the marked processes that live: process id to command line."""
        found: dict[int, str] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = words.decode(errors="replace")
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def expect(self, count: int, within: float = 10.0) -> None:
        """Wait until there are so many; one that is just beginning shows no mark for a moment."""
        deadline = time.monotonic() + within
        while len(found := self.processes()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(found) >= count, found

    def expect_nothing(self, within: float = 15.0) -> None:
        """Wait until nothing is left; fail if something stays."""
        deadline = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left
        assert self._devices() == self.devices


@pytest.fixture
def traces() -> Traces:
    """Return a fresh mark."""
    return Traces()
