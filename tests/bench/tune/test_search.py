"""A search: the same for everybody, again the same, resumed where it was, and honest about what it shows."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench import workloads
from gossamer.bench.tune import (
    Candidate,
    Search,
    SearchOverride,
    SearchPlan,
    Trial,
    Tuning,
    TuningError,
    is_tuning,
    ranking,
)
from gossamer.bench.tune.ranking import student
from gossamer.bench.tune.training import Length, parameters_of, run
from gossamer.core.errors import GossamerError
from gossamer.recipe import Recipe

RECIPES = {"ddp": "allreduce", "topk": "topk(ratio=0.3)"}


def asked(**changes: Any) -> SearchPlan:
    facts: dict[str, Any] = {
        "recipes": RECIPES,
        "workload": "ridge",
        "trials": 3,
        "steps": 12,
        "repeats": 2,
        "ranks": 2,
    }
    return SearchPlan(**(facts | changes))


def done(question: SearchPlan, earlier: Tuning | None = None, stop: int = 10**6) -> Tuning:
    search = Search(question)
    if earlier is not None:
        search.resume(earlier)

    def tell(tuning: Tuning, trial: Trial) -> None:
        if len(tuning.trials) == stop:
            raise KeyboardInterrupt

    try:
        search.run(tell)
    except KeyboardInterrupt:
        assert len(search.tuning.trials) == stop
    return search.tuning


@cache
def plain() -> Tuning:
    """One search that many tests look at, and none changes."""
    return done(asked())


def told(tuning: Tuning) -> list[dict[str, Any]]:
    """All but how long it took here."""
    return [vars(t) | {"seconds": 0.0} for t in tuning.trials]


def test_everybody_has_as_many_trials_and_other_seeds_judge() -> None:
    tuning = plain()
    assert [len(tuning.searched(c.name)) for c in tuning.contenders] == [3, 3]
    assert [t.lr for t in tuning.searched("ddp")] == [t.lr for t in tuning.searched("topk")]
    for name in RECIPES:
        best = tuning.best(name)
        assert best is not None
        assert best.quality == min(t.quality for t in tuning.searched(name))
        assert tuning.judged(best).keys() == {10, 11}
    assert tuning.complete


def test_the_same_search_says_the_same_and_another_seed_something_else() -> None:
    assert told(plain()) == told(done(asked()))
    assert told(plain()) != told(done(asked(seed=1)))


@pytest.mark.parametrize("stop", [1, 7])
def test_a_search_that_was_cut_short_goes_on_as_if_it_had_not_been(tmp_path: Path, stop: int) -> None:
    first = done(asked(), stop=stop)
    assert not first.complete
    first.write(tmp_path / "record.json")
    second = done(asked(), Tuning.read(tmp_path / "record.json"))
    assert told(second) == told(plain())


def test_cut_short_it_was_fair_as_far_as_it_came() -> None:
    cut = done(asked(trials=5), stop=5)
    assert [len(cut.searched(c.name)) for c in cut.contenders] == [3, 2]


def test_more_trials_only_add_to_a_search() -> None:
    grown = done(asked(trials=5, repeats=3), deepcopy(plain()))
    assert told(grown)[: len(told(plain()))] == told(plain())
    assert grown.complete
    assert [len(grown.searched(c.name)) for c in grown.contenders] == [5, 5]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": 13}, "other steps: 12, and now 13"),
        ({"seed": 1}, "other seed"),
        ({"ranks": 3}, "other ranks"),
        ({"workload": "logistic"}, "other workload: 'ridge', and now 'logistic'"),
        ({"recipes": {"ddp": "allreduce"}}, "other contenders"),
        ({"wishes": [SearchOverride.of("ratio")]}, "other contenders"),
        ({"trials": 2}, "ask for as many, or more"),
        ({"repeats": 1}, "ask for as many, or more"),
    ],
)
def test_another_search_is_not_resumed(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(TuningError, match=says):
        Search(asked(**changes)).resume(plain())


def test_a_resumed_search_keeps_the_commands_that_do_it_all_again() -> None:
    earlier = deepcopy(plain())
    for earlier.command in ("gossamer tune topk", "gossamer tune topk\ngossamer tune topk --resume"):
        search = Search(asked(), "gossamer tune topk --resume")
        search.resume(earlier)
        assert search.tuning.command == "gossamer tune topk\ngossamer tune topk --resume"


def test_a_search_by_another_metric_is_not_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where sacrebleu has gone, or has come: qualities of the two would stand in one table."""
    before = plain()
    monkeypatch.setattr(workloads.Ridge, "metric", "BLEU")
    with pytest.raises(TuningError, match="other metric: 'excess loss over the optimum', and now 'BLEU'"):
        Search(asked()).resume(before)


@pytest.mark.parametrize("edited", [{"rates": [0.5]}, {"parameters": 12}])
def test_a_search_on_a_workload_that_was_edited_is_not_resumed(edited: dict[str, Any]) -> None:
    """Trials at the rates of one would stand beside those of the other."""
    with pytest.raises(TuningError, match=f"other {next(iter(edited))}: "):
        Search(asked()).resume(replace(plain(), **edited))


def test_what_diverged_is_said_and_never_best(tmp_path: Path) -> None:
    tuning = done(asked(wishes=[SearchOverride.of("lr=1e3,2e3")], steps=40))
    for name in RECIPES:
        given, *others = tuning.searched(name)
        assert given.outcome == "ok"
        assert tuning.best(name) is given
        assert {t.outcome for t in others} == {"diverged"}
        assert all("no better than" in t.error or "not finite" in t.error for t in others)
    tuning.write(tmp_path / "record.json")
    assert is_tuning(tmp_path / "record.json")
    assert math.isnan(Tuning.read(tmp_path / "record.json").trials[2].quality) == math.isnan(tuning.trials[2].quality)


def test_values_that_the_ranks_do_not_bear_cost_their_trial_and_no_more() -> None:
    wish = SearchOverride.of("backups=5")  # of two ranks
    tuning = done(asked(recipes={"ddp": "allreduce", "backup": "backup(0)"}, wishes=[wish], repeats=1))
    given, *others = tuning.searched("backup")
    assert tuning.best("backup") is given
    assert {t.outcome for t in others} == {"refused"}
    assert all("backups" in t.error for t in others)
    with pytest.raises(GossamerError, match="backups"):
        done(asked(recipes={"backup": "backup(5)"}))


def test_a_loss_that_is_no_number_ends_a_trial_at_once() -> None:
    result = run(workloads.get("ridge"), Recipe.of("allreduce"), 1e150, steps=500, ranks=2)
    assert result.steps < 50
    assert "not finite at step" in result.error


def test_trials_end_at_the_end_of_a_round_and_within_the_budget() -> None:
    model = parameters_of(workloads.get("ridge").model())  # 32 numbers of 8 bytes: 384 a step of four ranks
    dense, local = Recipe.of("allreduce"), Recipe.of("local_sgd(8)")
    assert Length(50).of(dense, model, 4) == 50
    assert Length(50).of(local, model, 4) == 48
    assert Length(5).of(local, model, 4) == 5
    assert Length(50, 3840).of(dense, model, 4) == 10
    assert Length(50, 383).of(dense, model, 4) == 0
    tuning = done(asked(ranks=4, budget=3840, steps=50, recipes={"ddp": "allreduce", "topk": "topk"}))
    assert all(t.sent <= 3840 for t in tuning.trials)
    assert {t.steps for t in tuning.searched("ddp")} == {10}
    assert len({t.steps for t in tuning.searched("topk")} - {10}) > 0
    with pytest.raises(TuningError, match="does not pay for one step"):
        Search(asked(ranks=4, budget=383))


def test_no_rank_sees_a_batch_twice_where_steps_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[int, int]]()
    plain = workloads.Ridge.batch

    def batch(self: workloads.Ridge, step: int, rank: int, size: int) -> workloads.Batch:
        seen.append((step, rank))
        return plain(self, step, rank, size)

    monkeypatch.setattr(workloads.Ridge, "batch", batch)
    run(workloads.get("ridge"), Recipe.of("allreduce + every_step(micro_batches=3)"), 1.0, steps=4, ranks=2)
    assert sorted(seen) == [(step, rank) for step in range(12) for rank in range(2)]


# -- what it shows -----------------------------------------------------------------------------------------------------


def made(qualities: dict[str, list[float]], lower: bool = True) -> Tuning:
    """Each recipe's best was judged on as many seeds."""
    seeds = list(range(10, 10 + max(map(len, qualities.values()))))
    names = [Candidate(n, "allreduce(fp32())", {}) for n in qualities]
    facts = ("", "", "ridge", "iid", "", "loss", lower, 1, [0.1], 4, 10, None, 1, seeds, 0, names)
    tuning = Tuning(*facts)  # pyright: ignore
    for name, values in qualities.items():
        for number, seed, quality in [(0, 0, 1.0), *((-1, s, q) for s, q in zip(seeds, values))]:
            lost = "diverged" if math.isnan(quality) else "ok"
            tuning.trials.append(Trial(name, number, seed, name, 1.0, {}, lost, 10, quality, 1.0, 1, 1.0))
    return tuning


def test_a_difference_is_shown_only_where_the_seeds_agree_on_it() -> None:
    rows = {
        s.contender.name: s
        for s in ranking(
            made(
                {
                    "ddp": [1.0, 1.1, 1.2],
                    "same": [1.02, 1.07, 1.22],
                    "worse": [1.2, 1.31, 1.4],
                    "better": [0.8, 0.9, 1.01],
                }
            )
        )
    }
    assert {n: s.verdict for n, s in rows.items()} == {
        "ddp": "baseline",
        "same": "no difference",
        "worse": "worse",
        "better": "better",
    }
    assert list(rows) == ["better", "ddp", "same", "worse"]
    assert [s.tied for s in rows.values()] == [True, False, False, False]


def test_where_more_is_better_the_order_turns_round() -> None:
    found = ranking(made({"ddp": [0.8, 0.81, 0.82], "better": [0.9, 0.92, 0.91]}, lower=False))
    assert [(s.contender.name, s.verdict) for s in found] == [("better", "better"), ("ddp", "baseline")]


def test_one_seed_shows_nothing_and_one_that_diverged_is_not_averaged_away() -> None:
    single = ranking(made({"ddp": [1.0], "other": [0.5]}))
    assert [(s.verdict, s.tied) for s in single] == [("one seed", True), ("baseline", True)]
    lost = ranking(made({"ddp": [1.0, 1.1], "other": [0.5, math.nan]}))
    assert [(s.verdict, s.mean is None) for s in lost] == [("baseline", False), ("diverges", True)]


def test_beside_a_baseline_that_diverged_nobody_is_told_that_there_was_one_seed() -> None:
    found = ranking(made({"ddp": [1.0, math.nan, 1.2], "other": [0.5, 0.6, 0.7]}))
    assert [(s.contender.name, s.verdict) for s in found] == [("other", "no baseline"), ("ddp", "diverges")]


def test_two_that_nothing_tells_apart_are_tied() -> None:
    found = ranking(made({"ddp": [1.0, 1.1, 1.2], "same": [1.02, 1.07, 1.22]}))
    assert [s.tied for s in found] == [True, True]


def test_students_t_is_that_of_the_tables() -> None:
    """Two seeds lean on the heaviest tail there is."""
    assert (student(1), student(2), student(4), student(200)) == (6.314, 2.920, 2.132, 1.75)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "run"}, "of no search"),
        ({"format": 99}, "format 99"),
        ({"trials": [{}]}, "has no 'quality'"),
        ({"steps": "many"}, "steps of a tuning"),
    ],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "record.json"
    made({"ddp": [1.0]}).write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=says):
        Tuning.read(path)
