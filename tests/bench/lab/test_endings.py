"""However a lab ends, the right code comes back and nothing stays behind."""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import gossamer
from gossamer.bench.lab import LabResult, run_lab

pytestmark = pytest.mark.lab
Run = Callable[..., tuple[LabResult, list[list[str]]]]
OWNER = [sys.executable, str(Path(__file__).parent / "programs" / "owner.py")]
TEARDOWN = 40.0  # seconds; a lab takes one or two, and a machine may be busy


def start(traces: Any) -> subprocess.Popen[str]:
    """Start an owner whose processes ignore SIGTERM, and wait until both hosts run."""
    owner = subprocess.Popen(OWNER, env=traces.environment, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert {owner.stdout.readline(), owner.stdout.readline()} == {"[0] ready\n", "[1] ready\n"}
    return owner


def finish(owner: subprocess.Popen[str]) -> str:
    """Wait for the owner and return the rest of what it said."""
    rest, _ = owner.communicate(timeout=TEARDOWN)
    return rest


def test_the_first_failure_gives_the_exit_code(run: Run) -> None:
    program = '[ $RANK = 2 ] && exit 7; trap "exit 3" TERM; while :; do sleep 0.02; done'
    result, _ = run(3, None, "sh", "-c", program, grace=2.0)  # in which the others have come to their traps
    assert (result.exit_code, result.first_failure, result.timed_out) == (7, 2, False)
    assert [rank.exit_code for rank in result.ranks] == [3, 3, 7]
    assert [rank.stopped for rank in result.ranks] == [True, True, False]


def test_within_the_grace_the_others_may_end_by_themselves(run: Run) -> None:
    result, lines = run(2, None, "sh", "-c", "[ $RANK = 1 ] && exit 1; sleep 0.3; echo done", grace=20)
    assert (result.exit_code, lines[0]) == (1, ["done"])
    assert not any(rank.stopped for rank in result.ranks)
    assert result.seconds < 20


def test_who_ignores_sigterm_is_killed_with_all_descendants(run: Run, traces: Any) -> None:
    program = "trap '' TERM; setsid sleep 60 & [ $RANK = 0 ] && exit 5; sleep 60 & wait"
    result, _ = run(2, None, "sh", "-c", program, grace=2.0, kill_after=0.2, env=traces.label)
    assert (result.exit_code, result.ranks[1].exit_code) == (5, 137)
    assert result.seconds < 30  # and not 60
    traces.expect_nothing()


def test_too_long_is_exit_124(run: Run) -> None:
    result, lines = run(2, None, "sh", "-c", "printf unfinished; exec sleep 60", timeout=2.0)
    assert (result.exit_code, result.first_failure, result.timed_out) == (124, None, True)
    assert lines == [["unfinished"], ["unfinished"]]


@pytest.mark.parametrize(
    ("command", "code"), [(["/no/such/program"], 127), (["/etc"], 126), (["sh", "-c", "kill -9 $$"], 137)]
)
def test_a_command_that_cannot_run_says_so(run: Run, command: list[str], code: int) -> None:
    result, lines = run(2, None, *command, grace=0.5)
    assert result.exit_code == code
    assert code == 137 or all(command[0] in line for one in lines for line in one)


def test_a_failing_callback_ends_the_lab_and_is_raised(traces: Any) -> None:
    def refuse(rank: int, line: str) -> None:
        raise BrokenPipeError(line)

    program, mark = ["sh", "-c", "echo hello; sleep 60"], traces.label
    with pytest.raises(BrokenPipeError, match="hello"):
        run_lab(2, None, program, on_line=refuse, env=mark, kill_after=0.3)
    traces.expect_nothing()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_owner_leaves_nothing(traces: Any, number: int) -> None:
    owner = start(traces)
    traces.expect(9)  # owner, unshare, keeper; per host a shell and two sleeps
    owner.send_signal(number)
    finish(owner)
    assert owner.returncode != 0
    traces.expect_nothing()


def test_a_killed_child_ends_the_lab_with_its_code(traces: Any) -> None:
    owner = start(traces)
    shell = next(pid for pid, words in traces.processes().items() if words.startswith("sh -c"))
    os.kill(shell, signal.SIGKILL)
    assert "end 137" in finish(owner)
    traces.expect_nothing()


@pytest.mark.parametrize("part", ["inside.py", "unshare"])
def test_a_killed_keeper_is_an_error_and_leaves_nothing(traces: Any, part: str) -> None:
    owner = start(traces)
    victim = next(pid for pid, words in traces.processes().items() if part in words.split("--")[0])
    os.kill(victim, signal.SIGKILL)
    assert "end" not in finish(owner)
    assert owner.returncode == 1
    traces.expect_nothing()


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_random_kills_leave_nothing(traces: Any, count: int) -> None:
    rng = random.Random(3)
    for _ in range(count):
        owner = subprocess.Popen(OWNER, env=traces.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.03, 0.35))
        victim = rng.choice(sorted(traces.processes()) or [owner.pid])
        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        for process in (victim, owner.pid):  # if the victim did not bring the lab down, its owner does
            try:
                os.kill(process, number)
            except ProcessLookupError:
                continue
            time.sleep(rng.uniform(0, 0.1))
        owner.wait(TEARDOWN)
        traces.expect_nothing()


def test_labs_at_once_do_not_clash(run: Run) -> None:
    results: list[tuple[LabResult, list[list[str]]]] = []
    threads = [Thread(target=lambda: results.append(run(2, "100mbit", "sender.py", "2000000"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.exit_code for result, _ in results] == [0, 0, 0]
    for result, _ in results:
        assert 2_000_000 <= result.hosts[1].sent_bytes <= 3_000_000  # another's bytes would come on top


def copy_of_what_a_lab_needs(folder: Path) -> Path:
    """The program that makes a lab and what it imports: a clone may lie in a home that nobody else may enter."""
    program, package = folder / "tests" / "bench" / "lab" / "programs" / "owner.py", Path(gossamer.__file__).parent
    shutil.copytree(package / "bench" / "lab", folder / "src" / "gossamer" / "bench" / "lab")
    shutil.copytree(package / "core", folder / "src" / "gossamer" / "core")
    shutil.copy(package / "__init__.py", folder / "src" / "gossamer")
    shutil.copy(package / "bench" / "__init__.py", folder / "src" / "gossamer" / "bench")
    program.parent.mkdir(parents=True)
    shutil.copy(OWNER[1], program)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return program


def test_an_ordinary_user_can_make_a_lab() -> None:
    if os.geteuid() != 0:
        pytest.skip("these tests run as an ordinary user already")
    away = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-C", "/"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    for python in (sys.executable, os.path.realpath(sys.executable), "/usr/bin/python3"):
        recent = [*away, python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        if subprocess.run(recent, check=False, stderr=subprocess.DEVNULL).returncode == 0:
            break
    else:
        pytest.skip("no Python here that an ordinary user may run")
    with tempfile.TemporaryDirectory() as folder:
        program = copy_of_what_a_lab_needs(Path(folder))
        if subprocess.run([*away, "cat", str(program)], check=False, capture_output=True).returncode:
            pytest.skip(f"no place here that an ordinary user may read: {folder}")
        command = [*away, python, str(program), "/usr/sbin/tc qdisc show dev lab0; hostname"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rate 100Mbit") == 2
    assert {"[0] host0", "[1] host1"} <= set(done.stdout.splitlines())


def test_a_frozen_host_is_woken_to_hear_the_end_and_reported(run: Run, traces: Any) -> None:
    program = '[ $RANK = 0 ] && { sleep 0.5; exit 3; }; trap "exit 4" TERM; kill -STOP $$'
    result, _ = run(2, None, "sh", "-c", program, grace=1, kill_after=30, env=traces.label)
    assert (result.exit_code, result.first_failure) == (3, 0)
    assert [(r.exit_code, r.stopped, r.frozen) for r in result.ranks] == [(3, False, False), (4, True, True)]
    traces.expect_nothing()
