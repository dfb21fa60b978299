"""Somebody's own script on trial: what its ranks tell, what is refused, and what becomes of a run that fails."""

import contextlib
import io
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from tests.gang import Gang

from gossamer.bench.compare import script_launch
from gossamer.bench.compare.events import RankEvent, ScriptEnded, line_of
from gossamer.bench.compare.script_events import LAST, ScriptEvents, judge
from gossamer.bench.compare.script_launch import ScriptCompare, ScriptError
from gossamer.bench.compare.script_observer import ScriptPlan
from gossamer.bench.compare.script_rank import run as run_script
from gossamer.bench.record import Evaluation, Record, Run, Step
from gossamer.bench.report import render
from gossamer.bench.report.headline import headline
from gossamer.bench.report.study import study_of

pytestmark = pytest.mark.gang
PROGRAMS = Path(__file__).parent / "programs"


def said(rank: int, size: int, orders: str) -> tuple[int, list[str]]:
    """What one rank says, which has no process of its own here."""
    heard, argv, path, folder = io.StringIO(), sys.argv, list(sys.path), Path.cwd()
    with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
        code = run_script(ScriptPlan(**json.loads(orders)))
    os.chdir(folder)
    sys.argv, sys.path[:] = argv, path
    return code, heard.getvalue().splitlines()


def compare(
    gang: Gang, script: str, arguments: list[str], *recipes: str, steps: int = 0, folder: str = ""
) -> tuple[Record, int]:
    plan = ScriptPlan(str(PROGRAMS / script), arguments, {r: r for r in recipes}, 60.0, steps=steps, folder=folder)
    trial = ScriptCompare(plan, 2, None, "gossamer compare --script", lambda event: None, None)

    def run(events: ScriptEvents) -> None:
        for rank, (code, lines) in enumerate(gang.run(said, plan.command(events.run.name)[-1])):
            for line in lines:
                events.line(rank, line)
            if code:
                events.killed(rank, code)

    return trial.follow(run)


def run_of(record: Record, name: str) -> Run:
    found = record.run(name)
    assert found is not None
    return found


def test_a_script_trains_under_every_recipe_that_is_named(gang2: Gang) -> None:
    record, code = compare(gang2, "plain.py", [], "allreduce", "qsgd", "ddp", "compute")
    assert code == 0
    dense, qsgd, ddp, alone = record.runs
    assert [r.status for r in record.runs] == ["ok"] * 4
    assert [s.step for s in qsgd.steps] == list(range(1, 9))
    assert all(math.isfinite(s.loss) and s.wait is not None and s.codec is not None for s in qsgd.steps)
    assert (dense.recipe, qsgd.recipe) == ("allreduce(fp32())", "scatter(qsgd(bucket=128))")
    elements = 8 * 16 + 16 + 16 + 1
    assert dense.wire_bytes == 8 * 4 * elements == ddp.wire_bytes
    assert 0 < (qsgd.wire_bytes or 0) < 8 * elements
    assert (alone.wire_bytes, alone.alone) == (0, True)
    # There is no DistributedDataParallel in it, and the record does not pretend.
    assert (ddp.yardstick, ddp.recipe) == (False, "allreduce(fp32())")
    assert "'ddp' is allreduce() here" in record.note
    assert record.metric == "training loss (mean over 5 steps)"
    assert [e.step for e in qsgd.evaluations] == [5, 8]
    assert record.parameters == elements


def test_ddp_is_itself_where_the_script_has_it_and_on_metrics_may_tell_the_loss(gang2: Gang) -> None:
    record, code = compare(gang2, "hooked.py", [], "ddp", "allreduce", "compute", "qsgd")
    assert code == 0
    ddp, dense, alone, qsgd = record.runs
    assert [[s.step for s in r.steps] for r in record.runs] == [[2, 4, 6, 8]] * 4
    assert (ddp.yardstick, ddp.recipe, ddp.wire_bytes) == (True, "ddp", 8 * 4 * 9)
    assert ddp.steps[0].wait is None  # it does not say
    assert dense.steps[-1].loss == pytest.approx(ddp.steps[-1].loss, rel=1e-5)
    assert alone.steps[-1].loss != pytest.approx(ddp.steps[-1].loss, rel=1e-5)
    assert (qsgd.wire_bytes or 0) < 8 * 4 * 9


def test_held_out_quality_counts_where_a_script_tells_it_and_is_the_mean_over_ranks(gang2: Gang) -> None:
    record, _ = compare(gang2, "plain.py", ["judges"], "allreduce", "bf16")
    assert record.metric == "held-out loss"
    assert [(e.step, e.quality) for e in record.runs[1].evaluations] == [(4, 0.75), (8, 0.625)]


def test_a_script_that_tells_nothing_is_compared_by_what_it_calls_backward_on(gang2: Gang) -> None:
    told, _ = compare(gang2, "plain.py", [], "allreduce")
    heard, code = compare(gang2, "plain.py", ["tells nothing"], "allreduce")
    assert code == 0
    assert [s.loss for s in heard.runs[0].steps] == [s.loss for s in told.runs[0].steps]
    assert heard.metric == told.metric
    assert "the script logs no loss: compared by the values it calls backward() on" in heard.note
    assert not told.note


def test_what_a_controller_decides_is_in_the_record_in_its_own_words(gang2: Gang) -> None:
    record, code = compare(gang2, "plain.py", [], "allreduce + switch_exchange(4, scatter(qsgd()))")
    assert (code, record.runs[0].error) == (0, "")
    ((step, text),) = record.runs[0].decisions
    assert step == 5
    assert "scatter(qsgd" in text


def test_a_script_that_never_stops_ends_after_the_steps_asked_for(gang2: Gang) -> None:
    short, code = compare(gang2, "plain.py", ["never stops"], "allreduce", steps=8)
    whole, _ = compare(gang2, "plain.py", [], "allreduce")
    assert code == 0
    assert [s.step for s in short.runs[0].steps] == list(range(1, 9))
    assert short.runs[0].wire_bytes == whole.runs[0].wire_bytes


def test_machines_may_hold_the_script_in_other_folders_but_are_given_the_same_steps() -> None:
    recipes = {"ddp": "ddp", "qsgd": "qsgd"}
    here, there = (ScriptPlan(f"/{where}/train.py", [], recipes, steps=200) for where in ("home", "srv"))
    assert here.same_on_all() == there.same_on_all()
    assert ScriptPlan("/srv/train.py", [], recipes, steps=100).same_on_all() != here.same_on_all()


def threads_after(rank: int, size: int, orders: str) -> int:
    """How many threads torch has when a script has run in a process that had two."""
    torch.set_num_threads(2)
    said(rank, size, orders)
    found = torch.get_num_threads()
    torch.set_num_threads(1)
    return found


def test_a_script_keeps_the_threads_that_its_launcher_gave_it(gang2: Gang) -> None:
    plan = ScriptPlan(str(PROGRAMS / "plain.py"), [], {"allreduce": "allreduce"}, 60.0, steps=2)
    assert gang2.run(threads_after, plan.command("allreduce")[-1]) == [2, 2]


def test_recipes_do_not_go_on_where_another_ended(gang2: Gang, tmp_path: Path) -> None:
    record, code = compare(gang2, "plain.py", ["resumes"], "allreduce", "qsgd", folder=str(tmp_path))
    assert (code, [r.status for r in record.runs]) == (1, ["ok", "failed"])
    assert "plain.py loads snapshot.pt, which it saved under another recipe of this comparison" in record.runs[1].error
    apart = compare(gang2, "plain.py", ["resumes"], "bf16", "qsgd(2)", folder=str(tmp_path / "{recipe}"))
    assert apart[1] == 0
    assert (tmp_path / "bf16" / "snapshot.pt").exists()
    assert (tmp_path / "qsgd-2" / "snapshot.pt").exists()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("never attaches", "steps an optimizer before it attaches: put comm = gossamer.attach"),
        ("attaches twice", "attaches twice"),
        ("ignores", r"passes its own recipe \(qsgd\(bits=2\)\)"),
        ("never tells", r"logged no loss .* put comm.log\(loss=loss\)"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_its_first_run(gang2: Gang, wrong: str, why: str) -> None:
    with pytest.raises(ScriptError, match=f"plain.py {why}"):
        compare(gang2, "plain.py", [wrong], "allreduce", "qsgd")


def test_a_rank_that_was_killed_or_missed_others_is_told_from_the_one_at_fault() -> None:
    events = ScriptEvents(Run("qsgd", "qsgd"), 1, 5, lambda event: None)
    events.line(0, '@gossamer {"event": "died", "error": "PeerError: rank 1 is gone", "missed": true}')
    events.line(1, "Traceback")
    events.line(1, "no newline before @gossamer {not ours")
    events.line(1, '@gossamer {"event": "died", "error": "ZeroDivisionError: no more data", "missed": false}')
    events.killed(0, 1)
    events.conclude(2)
    assert events.run.status == "failed"
    assert events.run.error.startswith(
        "rank 1: ZeroDivisionError: no more data\nits last lines:\n  Traceback\n  no newline"
    )
    events.killed(2, -9)
    events.conclude(4)
    assert events.run.error == "rank 2: was killed by SIGKILL (the kernel does this when memory runs out)"


def test_the_headline_says_who_was_quick_to_where_all_got() -> None:
    slow, quick = Run("ddp", "ddp"), Run("qsgd", "qsgd")
    slow.evaluations = [Evaluation(5, 10.0, 1, 3.0), Evaluation(10, 20.0, 2, 2.0)]
    quick.evaluations = [Evaluation(5, 2.0, 1, 3.5), Evaluation(10, 4.0, 2, 2.5)]
    for run in (slow, quick):
        run.steps = [Step(5, 1.0, 3.0, None), Step(10, 2.0, 2.0, None)]
    record = Record(
        "", "", "train.py", "", "training loss", True, 1, 2, "1gbit", 0, script="/train.py", runs=[slow, quick]
    )
    head = headline(study_of(record))
    assert head.title == (
        "No recipe reached DDP’s final training loss, 2.00: closest was qsgd, 25 % short of it after 0.20 of DDP’s time."
    )
    assert "To 2.50, the last that all reached, qsgd was first: 4.00 s, DDP 15.0 s." in head.detail
    page = render(record)
    assert "a training loss, which says nothing of overfitting" in page
    assert "seed 0" not in page


def judged(losses: list[float], chunk: int = 5) -> Run:
    """A run whose one rank has logged these losses, one a step."""
    events = ScriptEvents(Run("ddp", "ddp"), 1, chunk, lambda event: None)
    for step, loss in enumerate(losses, 1):
        events.line(0, line_of(RankEvent(Step(step, 0.1 * step, loss, None))))
    events.conclude(1)
    judge([events.run], {"ddp": events}, chunk)
    return events.run


def test_the_last_mean_of_a_training_loss_is_over_as_many_steps_as_the_others() -> None:
    run = judged([1.0] * 102 + [9.0])  # windows of six steps, and one step that is left over
    assert [e.step for e in run.evaluations[-2:]] == [102, 103]
    assert run.evaluations[-1].quality == pytest.approx((5 * 1.0 + 9.0) / 6)


def test_a_script_whose_loss_is_no_number_any_more_has_no_last_quality() -> None:
    run = judged([3.0, 2.0, 1.0, 1.0, 1.0, *[math.nan] * 10])
    assert [e.step for e in run.evaluations] == [5, 10, 14]
    assert [math.isfinite(e.quality) for e in run.evaluations] == [True, False, False]
    record = Record("", "", "train.py", "", "training loss", True, 1, 1, "1gbit", 0, script="/train.py", runs=[run])
    assert record.target() is None
    once = judged([3.0, 2.0, math.nan, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # a step that was skipped spoils no mean
    assert [e.quality for e in once.evaluations] == [1.75, 1.0]


def test_a_run_that_fails_before_it_is_judged_does_not_take_the_others_quality_along() -> None:
    events = {name: ScriptEvents(Run(name, name), 1, 5, lambda event: None) for name in ("ddp", "qsgd", "topk")}
    for name, heard in events.items():
        heard.line(0, line_of(RankEvent(Step(1, 0.1, 5.0, None))))
        if name != "topk":
            heard.line(0, line_of(RankEvent(Evaluation(1, 0.2, None, 0.75))))
            heard.line(0, line_of(RankEvent(ScriptEnded(None, None, None, None))))
        heard.conclude(1)
    runs = [heard.run for heard in events.values()]
    assert [run.status for run in runs] == ["ok", "ok", "failed"]
    assert judge(runs, events, 5) == "held-out loss"
    assert [[e.quality for e in run.evaluations] for run in runs] == [[0.75], [0.75], []]
    runs[2].status = "ok"  # it came to its end, and has told no quality: only training losses can be compared
    assert judge(runs, events, 5) == "training loss (mean over 5 steps)"


def test_what_ranks_of_a_launcher_send_each_other_does_not_grow_with_what_a_script_prints() -> None:
    event = line_of(RankEvent(Step(1, 0.1, 5.0, None))).strip()
    lines = [f"line {number}" for number in range(99)]
    program = f"print({lines[0]!r})\nprint({event!r})\nprint(*{lines[1:]!r}, sep=chr(10))"
    heard = list[str]()
    code, told = script_launch._beside([sys.executable, "-c", program], 0, heard.append)
    assert (code, heard) == (0, [lines[0], event, *lines[1:]])
    assert told == [event, *lines[-LAST:]]


def test_what_was_judged_is_on_disk_while_a_script_trains(tmp_path: Path) -> None:
    """Its command may be killed then, and the record is all that is left."""
    plan, path = ScriptPlan("train.py", [], {"bf16": "bf16"}, 60.0), tmp_path / "record.json"
    trial = ScriptCompare(plan, 1, None, "", lambda event: None, path)

    def run(events: ScriptEvents) -> None:
        for what in (Step(1, 0.1, 5.0, None), Evaluation(1, 0.2, None, 0.75)):
            trial.journal.due = 0.0
            events.line(0, line_of(RankEvent(what)))
        raise KeyboardInterrupt

    trial.follow(run)
    kept = Record.read(path)
    assert (kept.metric, [e.quality for e in kept.runs[0].evaluations]) == ("held-out loss", [0.75])
    assert "its command was killed" in kept.runs[0].error


def test_a_held_out_value_that_rises_is_taken_for_no_loss_and_the_record_says_so() -> None:
    plan = ScriptPlan("train.py", [], {"ddp": "ddp", "qsgd": "qsgd"})
    trial = ScriptCompare(plan, 1, None, "", lambda event: None, None)

    def run(events: ScriptEvents) -> None:
        for step, accuracy in ((1, 0.5), (2, 0.9)):
            for what in (Step(step, 0.1 * step, 5.0, None), Evaluation(step, 0.1 * step, None, accuracy)):
                events.line(0, line_of(RankEvent(what)))
        events.line(0, line_of(RankEvent(ScriptEnded(None, None, None, None))))

    record, code = trial.follow(run)
    assert (code, record.target()) == (0, None)  # else all were there at their first look
    assert "less counts as better: log a loss, or 1 - accuracy" in record.note
