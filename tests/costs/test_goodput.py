"""Goodput: every second of a run has a cause, and folders that are no record of one run are refused."""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.costs.made_runs import EXCHANGE, FOUND, STEP, WARM, MadeProcess, restarted

from gossamer import CostError
from gossamer.costs.goodput import goodput_of
from gossamer.costs.run_files import read_file
from gossamer.costs.spent import Spent, spent_by, stretches, typical

START = FOUND + WARM - STEP  # seconds before the first step of a process, as it would usually be


def spent(process: MadeProcess, folder: Path) -> Spent:
    read = read_file(process.write(folder))
    cut = stretches(read)
    return spent_by(read, cut, typical(cut, read.period))


def close(found: Spent, **wanted: float) -> None:
    assert found.by_cause == pytest.approx({**Spent().by_cause, **wanted}, abs=1e-6)


def test_an_undisturbed_process_starts_and_steps(tmp_path: Path) -> None:
    found = spent(MadeProcess(0).works(101).ends(), tmp_path)
    close(found, starting=START, steps=101 * STEP)
    assert found.exchange == pytest.approx(101 * EXCHANGE)
    assert found.counted == 101


def test_waits_saves_and_standstills_are_told_apart(tmp_path: Path) -> None:
    process = MadeProcess(0).works(101).works(10, waits=4.0).saves(2.0).works(30).works(10, slower=3.0).works(50)
    close(
        spent(process.rests(1.5).ends(), tmp_path),
        starting=START,
        steps=201 * STEP,
        waiting=4.0,
        saving=2.0,
        standing=3.0 + 1.5,
    )


def test_steps_may_vary_by_half_of_one(tmp_path: Path) -> None:
    process = MadeProcess(0).works(101).works(10, slower=0.04).works(10, waits=0.1)
    close(spent(process.works(100).ends(), tmp_path), starting=START, steps=221 * STEP + 0.14)


def test_who_is_killed_loses_the_step_under_way(tmp_path: Path) -> None:
    close(
        spent(MadeProcess(0).works(101).rests(0.9), tmp_path), starting=START, steps=101 * STEP, lost=STEP, standing=0.8
    )


def test_a_wait_that_never_ended_is_a_wait(tmp_path: Path) -> None:
    process = MadeProcess(0).works(101)
    began = process.now
    for _ in range(3):
        process.now += 1.0
        process.say("waits", since=began)
    close(spent(process.ends("failed: PeerError"), tmp_path), starting=START, steps=101 * STEP, waiting=3.0)


def test_rounds_are_not_taken_for_disturbances(tmp_path: Path) -> None:
    """Every eighth step waits for a long time, which is what its recipe does."""
    process = MadeProcess(0, period=8, round=8)
    for _ in range(20):
        process.works(7).works(1, waits=0.5)
        process.say("steps", step=process.step, done=process.count, waited=process.waited)
    found = spent(process.ends(), tmp_path)
    assert found.waiting == 0.0
    assert found.standing == 0.0


def test_steps_after_the_checkpoint_were_done_again(tmp_path: Path) -> None:
    run = goodput_of(restarted(tmp_path))
    gap = 120.0 - 100.0 - (FOUND + WARM + 100 * STEP)
    close(run.spent, starting=4 * START, steps=2 * 152 * STEP, again=2 * 50 * STEP, standing=2 * gap)
    assert run.spent.counted == 2 * 152
    assert run.last == 152
    close(goodput_of(tmp_path, "processes").spent, starting=4 * START, steps=2 * 152 * STEP, again=2 * 50 * STEP)


def test_a_checkpoint_that_is_loaded_after_attach_is_where_a_process_begins(tmp_path: Path) -> None:
    MadeProcess(0).works(101).write(tmp_path)
    later = MadeProcess(0, 2, born=120.0, after=0)
    later.step = 51
    later.say("loaded", step=51)
    later.works(101).ends().write(tmp_path)
    run = goodput_of(tmp_path)
    assert run.spent.again == pytest.approx(50 * STEP)
    assert run.spent.counted == 152


def test_a_member_that_comes_back_lost_its_round_only(tmp_path: Path) -> None:
    """Killed at step 101 with rounds of 8, back at step 140 of the others: they have its steps up to 96."""
    MadeProcess(0, round=8).works(101).write(tmp_path)
    MadeProcess(0, 2, born=140.0, after=140, round=8).works(51).ends().write(tmp_path)
    found = goodput_of(tmp_path, "processes").spent
    assert found.lost == pytest.approx(5 * STEP)
    assert found.again == 0.0
    assert found.counted == pytest.approx(96 + 51)


def test_a_member_that_stays_away_lost_its_round_too_where_others_say_so(tmp_path: Path) -> None:
    MadeProcess(1, round=8).works(101).write(tmp_path)
    other = MadeProcess(0, round=8).works(101)
    other.say("lost", step=102, ranks=[1])
    other.works(50).ends().write(tmp_path)
    assert goodput_of(tmp_path).ranks[1].spent.lost == pytest.approx(5 * STEP)
    other.say("back", step=130, ranks=[1])
    other.write(tmp_path)
    assert goodput_of(tmp_path).ranks[1].spent.lost == 0.0


def test_a_machine_is_paid_for_between_processes_unless_it_was_another_or_had_ended_its_work(tmp_path: Path) -> None:
    def between(one: MadeProcess, next: MadeProcess) -> tuple[float, float | None]:
        for process in (one, next):
            process.write(tmp_path)
        first = goodput_of(tmp_path).ranks[0].processes[0]
        return first.gap, first.away

    end = 100.0 + FOUND + WARM + 1.0
    assert between(MadeProcess(0).works(11), MadeProcess(0, 2, born=end + 7, after=11).works(11)) == (
        pytest.approx(7),
        0,
    )
    gone = MadeProcess(0, 2, born=end + 7, after=11, boot="another").works(11)
    assert between(MadeProcess(0).works(11), gone) == (0.0, None)
    ended = MadeProcess(0).works(11).ends()
    assert between(ended, MadeProcess(0, 2, born=end + 7, after=11).works(11)) == (0.0, pytest.approx(7))


def test_a_launcher_is_paid_for_where_it_came_to_a_machine_first(tmp_path: Path) -> None:
    """Between two processes on one machine the launcher was there as well, but that time is counted already."""
    end = 100.0 + FOUND + WARM + 1.0
    MadeProcess(0, launching=4.0).works(11).write(tmp_path)
    MadeProcess(0, 2, born=end + 5.0, after=11, launching=20.0).works(11).write(tmp_path)
    MadeProcess(0, 3, born=50.0, after=22, launching=6.0, machine="another").works(11).ends().write(tmp_path)
    found = goodput_of(tmp_path).spent
    assert found.starting == pytest.approx(4.0 + 6.0 + 3 * START)
    assert found.standing == pytest.approx(5.0)


def test_held_out_values_have_what_all_ranks_took_until_then(tmp_path: Path) -> None:
    for rank in (0, 1):
        first = MadeProcess(rank).works(101)
        if rank == 0:
            first.say("held out", step=90, value=3.0)  # of a step that was done again
        first.write(tmp_path)
        later = MadeProcess(rank, 2, born=120.0, after=51).works(51)
        if rank == 0:
            later.say("held out", step=90, value=2.0)
            later.say("held out", step=100, value=None)
        later.ends().write(tmp_path)
    told = goodput_of(tmp_path, "processes").held_out
    each = (FOUND + WARM + 100 * STEP) + (FOUND + WARM + (90 - 52) * STEP)
    assert [(t.step, t.paid) for t in told] == [(90, pytest.approx(2 * each)), (100, pytest.approx(2 * (each + 1.0)))]
    assert told[0].value == 2.0
    assert math.isnan(told[1].value)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["works", "saves", "rests", "waits", "slower"]), st.floats(0.0, 5.0), st.integers(1, 30)
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1, 8]),
    st.booleans(),
)
def test_causes_add_up_to_all_of_the_time(acts: list[tuple[str, float, int]], period: int, killed: bool) -> None:
    process = MadeProcess(0, period=period, round=period)
    for act, amount, steps in acts:
        match act:
            case "works":
                process.works(steps)
            case "saves":
                process.saves(amount)
            case "rests":
                process.rests(amount)
            case "waits":
                process.works(steps, waits=amount)
            case _:
                process.works(steps, slower=amount)
    if not killed:
        process.ends()
    with tempfile.TemporaryDirectory() as folder:
        found = spent(process, Path(folder))
    assert found.paid == pytest.approx(process.lines[-1]["at"], abs=1e-5)
    assert all(value >= -1e-6 for value in found.by_cause.values())


# -- what is no record of one run ------------------------------------------------------------------------------------------


def twice(folder: Path) -> None:
    path = MadeProcess(0).works(11).write(folder)
    (folder / "rank0.2.efgh.jsonl").write_text(path.read_text())


def at_once(folder: Path) -> None:
    MadeProcess(0).works(101).write(folder)
    MadeProcess(0, 2, born=105.0).works(101).write(folder)


def anew(folder: Path) -> None:
    MadeProcess(0).works(11).ends().write(folder)
    MadeProcess(0, 2, born=200.0).works(11).write(folder)


def another_model(folder: Path) -> None:
    MadeProcess(0).works(11).write(folder)
    MadeProcess(1, model="two").works(11).write(folder)


def damaged(folder: Path) -> None:
    path = MadeProcess(0).works(31).write(folder)
    path.write_text(path.read_text().replace('"steps", "at"', '"steps", "when"', 1))


def no_json(folder: Path) -> None:
    path = MadeProcess(0).works(31).write(folder)
    path.write_text(path.read_text() + "hello\n" + json.dumps({"event": "alive", "at": 99}) + "\n")


def headless(folder: Path) -> None:
    path = MadeProcess(0).write(folder)
    path.write_text(path.read_text()[:20])


def later_form(folder: Path) -> None:
    MadeProcess(0, form=2).write(folder)


def renamed(folder: Path) -> None:
    MadeProcess(0).write(folder).rename(folder / "rank1.1.abcd.jsonl")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (twice, "overlap: rank 0 was in two processes at once, or a file was copied"),
        (at_once, "overlap: rank 0 was in two processes at once"),
        (anew, "holds two runs: .* ended in order at step 11, and .* began anew"),
        (another_model, "holds two runs: .* trained other models. Move the files"),
        (damaged, r"line 4 is not what gossamer writes \(no 'at'\)"),
        (no_json, "line 7 is not what gossamer writes: 'hello'. Take the line out"),
        (headless, "ends before its first line does"),
        (later_form, "it has form 2, and this gossamer reads up to 1"),
        (renamed, "it is of rank 0, and its name says 1"),
        (lambda folder: (folder / "rankX.jsonl").write_text(""), "not named as events of a run are"),
        (lambda folder: None, "holds no events of a run .* Record a run with attach"),
    ],
)
def test_what_is_no_record_of_one_run_is_refused(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    make(tmp_path)
    with pytest.raises(CostError, match=why):
        goodput_of(tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="there is no folder"):
        goodput_of(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(CostError, match="is not a folder"):
        goodput_of(tmp_path / "file")


def test_a_last_line_that_is_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    path = MadeProcess(0).works(101).write(tmp_path)
    whole = goodput_of(tmp_path).spent
    path.write_text(path.read_text() + '{"event": "ste')
    run = goodput_of(tmp_path)
    assert run.cut == [path]
    assert run.spent == whole


def test_events_that_a_later_version_adds_are_passed_over(tmp_path: Path) -> None:
    process = MadeProcess(0).works(11)
    process.say("something new", of="interest")
    process.write(tmp_path)
    assert goodput_of(tmp_path).last == 11


def test_files_that_each_machine_kept_for_itself_may_lie_in_subfolders(tmp_path: Path) -> None:
    MadeProcess(0).works(11).write(tmp_path / "a")
    MadeProcess(1).works(11).write(tmp_path / "b")
    run = goodput_of(tmp_path)
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert run.missing == []
