"""Commands as a user starts them, and a look at what they leave running."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gossamer.cli.app import run
from gossamer.lab import available

COMMAND = [sys.executable, "-m", "gossamer.cli"]
PATIENCE = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a lab where none can be made, and say why."""
    reason = available()
    for item in items:
        if reason is not None and item.get_closest_marker("lab"):
            item.add_marker(pytest.mark.skip(reason=reason))


class Shell:
    """Starts commands in a folder of their own. All that they start carries a mark, by which it is found."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS")}
        self.environment = {
            **clean,
            "GOSSAMER_TEST_MARK": self.mark,
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        }

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        settings |= {"cwd": self.folder, "env": self.environment, "start_new_session": True}
        return subprocess.Popen([*COMMAND, *words], **(settings | options))

    def run(self, *words: str, **options: Any) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out or "", err or ""

    def processes(self) -> dict[int, str]:
        """Marked processes that live: process id to command line."""
        found: dict[int, str] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(process.name)] = words.decode(errors="replace")
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks, without the interpreters that start them."""
        return sorted(
            pid
            for pid, words in self.processes().items()
            if " -m gossamer.trial.rank " in words and "local" not in words and "unshare" not in words
        )

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid in self.ranks():
            if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(self.processes())

    def await_steps(self, process: "subprocess.Popen[str]") -> None:
        """Wait until a command with --json tells of its first step."""
        assert process.stdout is not None
        wait_for(lambda: '"event": "step"' in process.stdout.readline())  # type: ignore[union-attr]

    def expect_nothing(self, within: float = 12.0) -> None:
        wait_for(lambda: not self.processes(), within, lambda: str(self.processes()))


def wait_for(ready: Callable[[], Any], within: float = PATIENCE, what: Callable[[], str] = str) -> Any:
    """The first answer that is not empty."""
    deadline = time.monotonic() + within
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"waited {within} s: {what()}"
        time.sleep(0.05)
    return answer


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    for pid in shell.processes():  # only after a failure
        os.kill(pid, 9)


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Say something at the command line, in an empty folder; returns the exit code, output and errors."""

    def say(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gossamer", *words])
        code = run()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    monkeypatch.chdir(tmp_path)
    return say
