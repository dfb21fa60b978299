"""`gossamer tune`, as a user types it, in this process: what it prints, keeps, refuses and resumes."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.bench.cli.conftest import Shell

from gossamer.bench.tune import Tuning

Say = Callable[..., tuple[int, str, str]]
QUICK = ("--workload", "ridge", "--steps", "6", "--hosts", "2", "--repeats", "2")

WRONG = [
    ("tune", "Missing argument"),
    ("tune topk --trials 0", "--trials"),
    ("tune topk --repeats 0", "--repeats"),
    ("tune topk --steps 0", "--steps"),
    ("tune topkk", "there is no recipe 'topkk'. Did you mean 'topk'?"),
    ("tune qsgd(bits=99)", "bits must be between 1 and 8"),
    ("tune topk --workload rigde", "there is no workload called 'rigde'. Did you mean 'ridge'?"),
    ("tune topk --workload ridge --shards moon", "ridge has no shards 'moon'"),
    ("tune ddp-fp16", "'ddp-fp16' is a baseline"),
    ("tune topk topk", "'topk' is named twice"),
    ("tune topk --workload ridge --knob ratoi", "no recipe here has a knob 'ratoi'. Did you mean 'ratio'?"),
    ("tune topk --workload ridge --knob index", "topk.index has no range to search"),
    ("tune topk --workload ridge --knob ratio=0.5..2", "topk: ratio must lie in (0, 1], got 2.0"),
    ("tune topk --workload ridge --budget lots", "--budget 'lots' is not a number of bytes"),
    ("tune topk --workload ridge --budget 5", "a budget of 5 bytes does not pay for one step"),
    ("tune topk --workload ridge --resume", "--resume needs --out"),
    ("tune topk --workload ridge --resume --out nowhere", "nowhere/record.json cannot be read: No such file"),
]


@pytest.mark.parametrize(("words", "what"), WRONG)
def test_wrong_input_is_one_line_and_nothing_is_touched(say: Say, tmp_path: Path, words: str, what: str) -> None:
    code, out, err = say(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("gossamer: ")
    assert what in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_search_prints_expressions_and_leaves_a_record_and_a_report(say: Say) -> None:
    code, out, err = say("tune", "topk(ratio=0.3)", "local_sgd(3)", *QUICK, "--trials", "3", "--out", "run")
    assert code == 0
    tuning = Tuning.read(Path("run/record.json"))
    assert [c.name for c in tuning.contenders] == ["ddp", "topk(ratio=0.3)", "local_sgd(3)"]
    assert tuning.complete
    assert len(err.splitlines()) == len(tuning.trials) == 3 * (3 + 2)
    for contender in tuning.contenders:
        best = tuning.best(contender.name)
        assert best is not None
        assert f"{contender.name}: {best.recipe}" in out
    page = Path("run/report.html").read_text()
    assert page.count('class="trial') - page.count('class="trials"') == 9
    assert page.count('class="trial best"') == 3
    again = Path("run/report.html").read_bytes()
    assert say("report", "run")[0] == 0
    assert Path("run/report.html").read_bytes() == again
    assert "| ddp |" in say("report", "run", "--markdown")[1]
    assert say("report", "run", "--figures", "plots")[0] == 2
    assert not Path("plots").exists()


def test_what_is_printed_as_best_can_be_typed(say: Say) -> None:
    say("tune", "qsgd", *QUICK, "--trials", "2", "--out", "run")
    best = Tuning.read(Path("run/record.json")).best("qsgd")
    assert best is not None
    code, out, _ = say("recipes", best.recipe, "--workload", "ridge")
    assert code == 0
    assert best.recipe in out


def test_brackets_of_a_name_are_printed_and_end_no_search(say: Say) -> None:
    globbed = """scatter(bf16()) + rule("name != '[/x]*'", scatter(fp16()))"""
    code, out, _ = say("tune", globbed, *QUICK, "--trials", "1", "--out", "run")
    assert code == 0
    assert out.count(globbed) >= 2  # in the table, and before the best


def test_a_search_is_resumed_and_grown_but_not_begun_over(say: Say) -> None:
    words = ("tune", "qsgd", *QUICK, "--out", "run", "--json")
    first = [json.loads(line) for line in say(*words, "--trials", "2")[1].splitlines()]
    code, _, err = say(*words, "--trials", "2")
    assert code == 2
    assert "holds a search already: continue it with --resume" in err
    assert say(*words, "--trials", "2", "--resume")[1] == ""
    grown = [json.loads(line) for line in say(*words, "--trials", "3", "--resume")[1].splitlines()]
    assert [(e["contender"], e["number"]) for e in grown][:2] == [("ddp", 2), ("qsgd", 2)]
    assert all(e["event"] == "trial" for e in [*first, *grown])
    code, _, err = say(*words, "--trials", "3", "--resume", "--seed", "1")
    assert code == 2
    assert "other seed: 0, and now 1" in err


def test_with_quiet_nothing_is_said(say: Say) -> None:
    assert say("tune", "qsgd", *QUICK, "--trials", "1", "--out", "run", "--quiet") == (0, "", "")


def test_a_record_that_cannot_be_written_ends_a_search_in_one_line(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", denied)
    code, _, err = say("tune", "qsgd", *QUICK, "--trials", "1", "--out", "run")
    assert (code, err) == (1, "gossamer: run/record.json could not be written: Permission denied\n")


def test_a_folder_of_another_command_is_no_search(say: Say, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text('{"written by": "gossamer", "format": 2}')
    code, _, err = say("tune", "qsgd", *QUICK, "--out", "run", "--resume")
    assert code == 2
    assert "is not a record of a search" in err


def test_interrupted_it_keeps_what_it_had(shell: Shell) -> None:
    words = ("tune", "qsgd", "--workload", "ridge", "--steps", "40", "--trials", "400", "--out", "run", "--json")
    process = shell.start(*words)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "gossamer: interrupted by SIGINT\n")
    kept: Any = Tuning.read(shell.folder / "run" / "record.json")
    assert vars(kept.trials[0]) == {k: v for k, v in told.items() if k != "event"}
    assert not kept.complete
    assert "--resume goes on with it" in (shell.folder / "run" / "report.html").read_text()
    shell.expect_nothing()
