"""gossamer compare --script as it is typed: on real ranks, and what is refused before anything starts."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.record import Record

PROGRAMS = Path(__file__).parents[1] / "compare" / "programs"
PLAIN = str(PROGRAMS / "plain.py")


@pytest.mark.gang
def test_a_rank_that_fails_ends_the_run_on_all_and_the_report_has_its_last_words(shell: Shell) -> None:
    code, out, err = shell.run(
        "compare", "--script", PLAIN, "allreduce", "--hosts", "2", "--out", "runs/a", "--", "fails"
    )
    assert code == 1
    assert "allreduce: rank 1: ZeroDivisionError: no more data (line " in err
    record = Record.read(shell.folder / "runs" / "a" / "record.json")
    run = record.runs[0]
    assert (record.workload, record.summary, run.status) == ("plain.py", "plain.py fails", "failed")
    assert "  rank 1 was here" in run.error
    page = (shell.folder / "runs" / "a" / "report.html").read_text()
    assert "rank 1 was here" in page
    assert "ZeroDivisionError" in out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--script", "train.py", "qsgd"), "train.py cannot be read: No such file or directory"),
        (("--script", "broken.py", "qsgd"), "broken.py is not valid Python: line 1"),
        (("--script", PLAIN, "ddp-powersgd"), "with --script give 'ddp' or 'compute'"),
        (("qsgd", "--cwd", "there"), "--cwd is the folder a script runs in, and there is no --script"),
        (("--script", PLAIN, "qsgd", "--workload", "lm"), "--workload has no effect with --script"),
        (("--script", PLAIN, "qsgt"), "there is no recipe 'qsgt'"),
        (("--script", PLAIN, "qsgd", "--cwd", "broken.py"), "broken.py: Not a directory; give another folder"),
        (("--script", PLAIN, "qsgd", "--cwd", "broken.py/{recipe}"), "broken.py/qsgd: Not a directory; give another"),
        (("--script", str(PROGRAMS / "hooked.py"), "slowmo"), "slowmo with DistributedDataParallel: "),
        (("qsgd", "--", "--steps"), "arguments after -- belong to a script, and there is no --script"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_touched(
    say: Callable[..., tuple[int, str, str]], words: tuple[str, ...], why: str
) -> None:
    Path("broken.py").write_text("def (:")
    code, out, err = say("compare", *words)
    assert (code, out) == (2, "")
    assert why in err
    assert [p.name for p in Path.cwd().iterdir()] == ["broken.py"]
