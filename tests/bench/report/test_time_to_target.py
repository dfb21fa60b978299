"""Time to quality: between evaluations, over seeds, and who cannot be told from the first."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.bench.report.test_numbers import record, run

from gossamer.bench.record import Evaluation, Record, RepeatedRuns, Run
from gossamer.bench.report import render, write_markdown
from gossamer.bench.report.charts import LineChart, charts
from gossamer.bench.report.headline import headline
from gossamer.bench.report.study import study_of
from gossamer.bench.report.time_to_target import arrival, doubt, ratio


def test_a_fraction_of_a_nat_does_not_cost_five_steps() -> None:
    """One was at 4.0001 where 4 counted: it was charged until its next evaluation."""
    base, near = run("ddp", (50, 5.0), (100, 4.0)), run("bf16", (25, 5.0), (50, 4.0001), (75, 3.9))
    row = study_of(record([base, near])).rows[0]
    assert (row.run.name, row.reached) == ("bf16", pytest.approx(50, abs=0.1))


def test_a_quality_that_comes_and_goes_is_reached_once() -> None:
    wild = run("topk", (10, 4.5), (20, 3.5), (30, 4.5), (40, 3.0))
    found = arrival(wild, 4.0, lower_is_better=True)
    assert found is not None
    assert (found.seconds, found.step, found.sent) == (15.0, 1.5, 15e6)


def test_neighbours_are_tied_and_others_are_not() -> None:
    runs = [run(name, (time / 2, 5.0), (time, 4.0)) for name, time in {"ddp": 100, "a": 25, "b": 24, "c": 30}.items()]
    study = study_of(record(runs))
    assert [r.run.name for r in study.first] == ["b", "a"]
    assert [r.run.name for r in study.rows if r.tied] == ["b", "a"]
    head = headline(study)
    assert (
        head.title
        == "b and a are tied: 4.0 to 4.2 times as fast as DDP to held-out loss 4.00: 24.0 s to 25.0 s instead of 100 s."
    )
    assert "Another run may turn them round." in head.detail
    assert "0.24×, tied" in write_markdown(study.record)
    assert render(study.record).count('class="tied">tied') == 2


def noisy(name: str, pace: float, noise: float, seed: int) -> Run:
    rng = random.Random(seed)
    path = [Evaluation(5 * k, 5 * k * pace, 0, 6 - 0.2 * k + rng.gauss(0, noise)) for k in range(1, 11)]
    return Run(name, name, evaluations=path)


def test_the_noise_of_its_own_judgements_widens_a_tie() -> None:
    """A deviation of .1 where a step is worth .04: 2.5 steps of 50. Over 200 runs, the doubt is of that size."""

    def mean(noise: float) -> float:
        found = list[float]()
        for seed in range(200):
            one = noisy("a", 1.0, noise, seed)
            at = arrival(one, 4.2, lower_is_better=True)
            found.append(doubt(one, at, lower_is_better=True) if at else 0.0)
        return sum(found) / len(found)

    assert mean(0.0) < 1e-6
    assert 0.03 < mean(0.1) < 0.08
    short = run("a", (1, 5.0), (2, 4.0))
    assert doubt(short, arrival(short, 4.0, True), True) == 0  # pyright: ignore  (too few to tell)


def three_seeds(**times: tuple[float, float, float]) -> Record:
    made = [[run(name, (t[k] / 2, 5.0), (t[k], 4.0)) for name, t in times.items()] for k in range(3)]
    whole = record(made[0])
    whole.again = [RepeatedRuns(1, made[1]), RepeatedRuns(2, made[2])]
    return whole


def test_seeds_give_bounds_and_decide_ties() -> None:
    """b is 8 % slower than a on every seed, which seeds see; c is faster on one and slower on two."""
    whole = three_seeds(ddp=(100, 120, 90), a=(25, 30, 22), b=(27, 32.5, 23.8), c=(26, 29, 23))
    study = study_of(whole)
    rows = {r.run.name: r for r in study.rows}
    assert [r.run.name for r in study.first] == ["a", "c"]
    found = rows["b"]
    assert found.time_bounds is not None
    assert found.time_bounds[0] < found.time_ratio < found.time_bounds[1]  # pyright: ignore
    assert found.reached == pytest.approx((27 + 32.5 + 23.8) / 3)
    assert ratio([], []) is None
    assert " times as fast as DDP to its final held-out loss: " in headline(study).title
    text = write_markdown(whole)
    assert "seeds 0, 1 and 2" in text
    assert "| recipe | time | time vs ddp |" in text  # each seed has a target of its own
    assert "tied" in text
    assert "seeds 0, 1 and 2" in render(whole)


def test_rows_stand_in_the_order_of_the_ratio_that_they_show() -> None:
    """On two seeds of three a is three times as fast as b, and on one so slow that its mean time is longer."""
    study = study_of(three_seeds(ddp=(100, 100, 100), b=(30, 30, 30), a=(10, 10, 100)))
    rows = {r.run.name: r for r in study.rows}
    assert (rows["a"].reached or 0) > (rows["b"].reached or 0)
    ratios = [r.time_ratio or 0 for r in study.rows]
    assert ratios == sorted(ratios)
    assert [r.run.name for r in study.rows] == ["a", "b", "ddp"]


def test_who_misses_on_one_seed_has_no_mean_time() -> None:
    whole = three_seeds(ddp=(100, 120, 90), a=(25, 30, 22))
    whole.again[0].runs[1] = run("a", (30, 4.5))
    study = study_of(whole)
    assert next(r for r in study.rows if r.run.name == "a").reached is None
    assert study.common == 4.0
    assert study.rows[-1].outcome == "not on every seed"


def test_of_several_seeds_the_headline_compares_means_and_says_on_which_nobody_got_there() -> None:
    whole = three_seeds(ddp=(100, 120, 90), a=(25, 30, 22))
    for k, quality in enumerate((4.1, 5.1, 6.1)):  # of which DDP ends with 4, 5 and 6
        runs = whole.runs if k == 0 else whole.again[k - 1].runs
        for one, last in zip(runs, (quality - 0.1, quality), strict=True):
            one.evaluations = [replace(one.evaluations[0], quality=9.0), replace(one.evaluations[1], quality=last)]
    title, detail = headline(study_of(whole))
    nobody = "No recipe reached DDP’s final held-out loss on"
    assert (title, detail) == (f"{nobody} any seed: closest was a, 2.0 % short of it in the mean over seeds.", "")
    whole.again[0].runs[1].evaluations[1].quality = 4.0  # there it did, by far
    title, detail = headline(study_of(whole))
    assert (title, detail) == (f"{nobody} every seed: closest was a, as good as it in the mean over seeds.", "")


def test_of_several_seeds_the_headline_says_with_which_the_baseline_set_no_target() -> None:
    whole = three_seeds(ddp=(100, 120, 90), a=(25, 30, 22))
    whole.again[0].runs[0] = Run("ddp", "ddp", "failed", "rank 1 was killed", evaluations=[Evaluation(0, 0.0, 0, 7.0)])
    title, detail = headline(study_of(whole))
    assert title.startswith("a ended with the best held-out loss")
    assert detail == "DDP was not evaluated after its start with seed 1, so there is no target to time."
    whole.runs[1].evaluations = []  # it failed there at once
    assert headline(study_of(whole)).detail == detail


def test_an_interrupted_baseline_is_compared_at_the_last_quality_that_all_reached() -> None:
    runs = [
        run("ddp", (50, 5.0), (100, 4.0), status="interrupted"),
        run("qsgd", (10, 5.0), (20, 4.4), status="interrupted"),
    ]
    study = study_of(record(runs))
    assert study.target == 4.4
    assert [r.run.name for r in study.rows] == ["qsgd", "ddp"]
    assert "the last quality that all reached" in headline(study).detail


def test_who_did_not_get_there_is_compared_where_all_were() -> None:
    study = study_of(record([run("ddp", (50, 5.0), (100, 4.0)), run("qsgd", (10, 5.0), (20, 4.5))]))
    assert (study.target, study.common) == (4.0, 4.5)
    assert {r.run.name: r.common for r in study.rows} == {"qsgd": 20, "ddp": 75}
    assert "time to 4.50" in write_markdown(study.record)
    assert "Time to 4.50" in render(study.record)


def test_the_axis_shows_where_it_is_decided() -> None:
    path = [Evaluation(k, float(k), k, 5.0 + 3.0 * 0.8**k) for k in range(41)]
    pair = [Run(name, name, evaluations=path) for name in ("ddp", "qsgd")]
    chart = next(c for c in charts(study_of(record(pair))) if isinstance(c, LineChart))
    assert chart.focus == path[8].quality


def test_seeds_survive_a_record(tmp_path: Path) -> None:
    whole = three_seeds(ddp=(100, 120, 90), a=(25, 30, 22))
    whole.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == whole
    table = json.loads((tmp_path / "record.json").read_text())
    del table["again"]  # of a record from before
    (tmp_path / "old.json").write_text(json.dumps(table))
    assert Record.read(tmp_path / "old.json").trials.keys() == {0}
