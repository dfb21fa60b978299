"""Commands as a user starts them: as processes that leave nothing running, or in this process, in milliseconds."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.listening import Listener, listeners
from tests.marked import LEAN, PATIENCE, Marked, wait_for

from gossamer.bench.cli.app import run

COMMAND = [sys.executable, "-m", "gossamer.bench.cli"]


class Shell(Marked):
    """Starts commands in a folder of their own. All that they start carries a mark, by which it is found."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._started = list[subprocess.Popen[str]]()
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "COLUMNS")}
        self.environment = {**clean, **self.label, "PYTHONPATH": LEAN}

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        settings |= {"cwd": self.folder, "env": self.environment, "start_new_session": True}
        self._started.append(subprocess.Popen([*COMMAND, *words], **(settings | options)))
        return self._started[-1]

    def run(self, *words: str, **options: Any) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        process = self.start(*words, **options)
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.end()
            out, err = process.communicate()
            raise AssertionError(f"no end of {words} within {PATIENCE:g} seconds:\n{out}\n{err}") from None
        return process.returncode, out or "", err or ""

    def close(self) -> None:
        """End what is left: after a failure, a pipe that is still open would be a warning in whichever test is next."""
        self.end()
        for process in self._started:
            with process:  # closes its pipes, and waits for it
                process.kill()

    def ranks(self) -> list[int]:
        """Process ids of the ranks, without what starts them in a lab."""
        return sorted(
            pid
            for pid, words in self.processes().items()
            if re.search(r"gossamer\.bench\.compare\.(rank|link) ", words) and "unshare" not in words
        )

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid in self.ranks():
            if f"RANK={number}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(self.processes())

    def expect_to_be_closed(self, process: "subprocess.Popen[str]") -> None:
        """Nobody on another machine can reach what a command and its two ranks listen on."""

        # All have found each other once each rank listens for its peers; and the store is there before.
        def both_listen() -> list[Listener]:
            assert process.poll() is None, f"it ended with code {process.returncode}, and its ranks were not seen"
            seen = listeners(self.processes())
            return seen if len({x.pid for x in seen} & set(self.ranks())) == 2 else []

        seen: list[Listener] = wait_for(both_listen)
        assert {x.pid for x in seen} == {process.pid, *self.ranks()}
        assert [x for x in seen if x.open_to_others] == []

    def await_steps(self, process: "subprocess.Popen[str]") -> None:
        """Wait until a command with --json tells of its first step."""
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            if '"event": "step"' in line:
                return
            seen += line
        _, err = process.communicate(timeout=PATIENCE)
        raise AssertionError(f"it ended with code {process.returncode} and without a step\n{seen}\n{err}")


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


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
