"""A rank that somebody has frozen ends the command all the same, and is not left behind."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.lab import available
from gossamer.bench.record import Record

TRAIN = ("train", "terngrad", "--workload", "ridge", "--hosts", "2", "--steps", "1000000", "--deadline", "6")
WAYS = {"local": ((), 0), "lab": (("--rate", "100mbit"), 1)}  # the network, and who is frozen


class Ended(NamedTuple):
    shell: Shell
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ended]]:
    """What became of a command one of whose ranks was frozen. They wait for deadlines, and so all of them at once."""
    shells = {way: Shell(tmp_path_factory.mktemp(way)) for way in WAYS if way == "local" or available() is None}

    def freeze(way: str) -> Ended:
        shell, (network, victim) = shells[way], WAYS[way]
        (shell.folder / "tmp").mkdir()
        shell.environment |= {"TMPDIR": str(shell.folder / "tmp")}
        process = shell.start(*TRAIN, *network, "--out", "x", "--json")
        shell.await_steps(process)
        os.kill(shell.rank(victim), signal.SIGSTOP)
        out, err = process.communicate(timeout=100)
        return Ended(shell, process.returncode, out, err)

    with ThreadPoolExecutor() as pool:
        futures = {way: pool.submit(freeze, way) for way in shells}
        yield lambda way: futures[way].result()
    for shell in shells.values():
        shell.end()


@pytest.mark.gang
@pytest.mark.parametrize("way", ["local", pytest.param("lab", marks=pytest.mark.lab)])
def test_the_others_give_up_the_report_says_who_was_frozen_and_nothing_is_left(
    ended: Callable[[str], Ended], way: str
) -> None:
    shell, code, out, err = ended(way)
    victim = WAYS[way][1]
    assert code == 1, err
    assert "Traceback" not in out + err
    shell.expect_nothing()
    run = Record.read(shell.folder / "x" / "record.json").runs[0]
    assert run.status == "failed"
    assert f"rank {victim} was frozen by SIGSTOP" in run.error
    assert f"rank {victim} was frozen by SIGSTOP" in (shell.folder / "x" / "report.html").read_text()
    assert run.steps
    left = {path.name.split("_")[0] for path in (shell.folder / "tmp").iterdir()}
    assert left <= {"torchinductor"}  # the compiler's cache, for all programs of this user


@pytest.mark.lab
def test_a_lab_says_which_host_was_frozen(shell: Shell) -> None:
    program = "[ $RANK = 1 ] && kill -STOP $$; exit 3"
    process = shell.start("lab", "--hosts", "2", "--timeout", "3", "--", "sh", "-c", program)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    lines = [line.split("; ", 1)[1] for line in err.splitlines() if line.startswith("host ")]
    assert lines == ["exit code 3", "frozen by a signal, and ended with the lab"]
    shell.expect_nothing()
