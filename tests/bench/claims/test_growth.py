"""A claim that grows keeps what it was judged by, and is judged on what is new."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.claims import toy

from gossamer.bench.claims import (
    ClaimError,
    ClaimRecord,
    PaperClaim,
    Statement,
    Study,
    begun,
    confirm,
    hash_of,
    run_claim,
    running,
)
from gossamer.bench.claims.pages import page
from gossamer.bench.claims.verdict import within

SMALL = replace(
    toy.CLAIM,
    plan={"numbers": toy.CLAIM.plan["numbers"]},
    statements=(toy.CLAIM.statements[0], toy.CLAIM.statements[4]),
)
FASTER = Statement("e", "Faster.", "at most 40 times", "holds", lambda e: within(e.last("clock", "three", "y"), 0, 204))


def grown_claim(statement: Statement = FASTER) -> PaperClaim:
    """The small claim, whose statement of time has a rule and a study now."""
    plan = {**SMALL.plan, "clock": Study(toy.measure, {"three": {"scale": 3.0}}, seeds=(30, 31, 32))}
    return replace(SMALL, plan=plan, statements=(SMALL.statements[0], statement))


def run(claim: PaperClaim, path: Path) -> ClaimRecord:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "_pool", toy.in_this_process)
        run_claim(claim, begun(claim, path), lambda record: record.write(path), lambda run, left: None)
    return ClaimRecord.read(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ClaimRecord:
    return run(SMALL, tmp_path_factory.mktemp("claims") / "toy.json")


def test_what_is_new_is_run_and_judged_and_what_was_judged_stays(small: ClaimRecord, tmp_path: Path) -> None:
    path, before = tmp_path / "toy.json", deepcopy(small)
    before.statements[0].found, before.runs[0].rows["y"] = "as it was found", [7.0, 7.0]  # neither is made again
    before.write(path)
    known = run(grown_claim(), path)
    assert [s.verdict for s in known.statements] == ["holds", "holds"]
    kept = {run.key: run.rows["y"] for run in known.runs}
    assert (known.statements[0].found, kept[before.runs[0].key]) == ("as it was found", [7.0, 7.0])
    assert (known.statements[0].plan, known.statements[1].plan) == (small.plan, "")
    assert {(r.study, r.case, r.seed) for r in known.runs} - {(r.study, r.case, r.seed) for r in small.runs} == {
        ("clock", "three", seed) for seed in (30, 31, 32)
    }
    assert known.plan == hash_of(grown_claim())
    assert (known.earlier, known.done) == ([], True)
    assert f"Judged by plan {small.plan}" in page(known)


def test_a_claim_that_has_grown_can_be_confirmed(small: ClaimRecord, tmp_path: Path) -> None:
    small.write(tmp_path / "toy.json")
    known = run(grown_claim(), tmp_path / "toy.json")
    known.sources = dict.fromkeys(known.sources, "other")
    made = list[str]()
    assert confirm(grown_claim(), known, lambda run, left: made.append(f"{run.study} {run.seed}")) == []
    assert sorted(made) == ["clock 30", "numbers 30", "numbers 30"]


def test_code_that_has_changed_stays_stale_when_a_claim_grows(small: ClaimRecord, tmp_path: Path) -> None:
    old = replace(small, sources=dict.fromkeys(small.sources, "other"))
    old.write(tmp_path / "toy.json")
    assert {*run(grown_claim(), tmp_path / "toy.json").sources.values()} >= {"other"}


@pytest.mark.parametrize(
    "other",
    [
        replace(grown_claim(), plan={"clock": grown_claim().plan["clock"]}),
        replace(grown_claim(), plan={**grown_claim().plan, "numbers": Study(toy.measure, {"one": {"scale": 1.5}})}),
        replace(grown_claim(), statements=(replace(SMALL.statements[0], rule="another"), FASTER)),
        replace(grown_claim(), statements=(replace(SMALL.statements[0], expected="not"), FASTER)),
        replace(grown_claim(), statements=(FASTER,)),
    ],
    ids=[
        "a study is gone",
        "a case has changed",
        "a rule has changed",
        "what was expected has changed",
        "a statement is gone",
    ],
)
def test_a_plan_in_which_anything_has_changed_is_another_plan(
    other: PaperClaim, small: ClaimRecord, tmp_path: Path
) -> None:
    small.write(tmp_path / "toy.json")
    with pytest.raises(ClaimError, match="is of another plan"):
        begun(other, tmp_path / "toy.json")


def test_a_claim_whose_runs_are_not_all_made_does_not_grow(small: ClaimRecord, tmp_path: Path) -> None:
    """Its statements have no verdicts yet, so nothing would tell those that waited from those with a rule."""
    replace(small, done=False).write(tmp_path / "toy.json")
    with pytest.raises(ClaimError, match="is of another plan"):
        begun(grown_claim(), tmp_path / "toy.json")
