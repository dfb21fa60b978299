"""What the lab's tests share: a lab or a reason to skip, and a look at what a lab might leave behind."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.marked import Marked

from gossamer.bench.lab import LabResult, run_lab

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture
def run() -> Callable[..., tuple[LabResult, list[list[str]]]]:
    """Run a command, or a program from `programs/`, in a lab; return the result and each rank's lines."""

    def run(hosts: int, rates: str | None, *command: str, **more: object) -> tuple[LabResult, list[list[str]]]:
        lines: list[list[str]] = [[] for _ in range(hosts * int(str(more.get("per_host", 1))))]
        if command[0].endswith(".py"):
            command = (sys.executable, str(PROGRAMS / command[0]), *command[1:])
        options: dict[str, object] = {"timeout": 50, "on_line": lambda rank, line: lines[rank].append(line)}
        return run_lab(hosts, rates, command, **(options | more)), lines  # type: ignore[arg-type]

    return run


class Traces(Marked):
    """What a lab and all that it started might leave behind: processes, and devices."""

    def __init__(self) -> None:
        super().__init__()
        self.devices = self._devices()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.label}

    def _devices(self) -> set[str]:
        names = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
        named = Path("/run/netns")
        return names | ({str(path) for path in named.iterdir()} if named.exists() else set())

    def expect_nothing(self, within: float = 40.0) -> None:
        super().expect_nothing(within)
        assert self._devices() == self.devices


@pytest.fixture
def traces() -> Traces:
    """Return a fresh mark."""
    return Traces()
