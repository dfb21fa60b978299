"""A rank that somebody has frozen ends the command all the same, and is not left behind."""

import os
import signal

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.record import Record

TRAIN = ("train", "terngrad", "--workload", "ridge", "--hosts", "2", "--steps", "1000000", "--deadline", "6")


@pytest.mark.gang
@pytest.mark.parametrize(
    ("network", "victim"),
    [pytest.param((), 0, id="local"), pytest.param(("--rate", "100mbit"), 1, marks=pytest.mark.lab, id="lab")],
)
def test_the_others_give_up_the_report_says_who_was_frozen_and_nothing_is_left(
    shell: Shell, network: tuple[str, ...], victim: int
) -> None:
    temporary = shell.folder / "tmp"
    temporary.mkdir()
    shell.environment |= {"TMPDIR": str(temporary)}
    process = shell.start(*TRAIN, *network, "--out", "x", "--json")
    shell.await_steps(process)
    os.kill(shell.rank(victim), signal.SIGSTOP)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in out + err
    shell.expect_nothing()
    run = Record.read(shell.folder / "x" / "record.json").runs[0]
    assert run.status == "failed"
    assert f"rank {victim} was frozen by SIGSTOP" in run.error
    assert f"rank {victim} was frozen by SIGSTOP" in (shell.folder / "x" / "report.html").read_text()
    assert run.steps
    left = {path.name.split("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchinductor"}  # the compiler's cache, for all programs of this user


@pytest.mark.lab
def test_a_lab_says_which_host_was_frozen(shell: Shell) -> None:
    program = "[ $RANK = 1 ] && kill -STOP $$; exit 3"
    process = shell.start("lab", "--hosts", "2", "--timeout", "3", "--", "sh", "-c", program)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 3
    lines = [line.split("; ", 1)[1] for line in err.splitlines() if line.startswith("host ")]
    assert lines == ["exit code 3", "frozen by a signal, and ended with the lab"]
    shell.expect_nothing()
