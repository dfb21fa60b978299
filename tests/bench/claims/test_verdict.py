"""The verdicts, against differences made by hand."""

import math

import pytest
import torch

from gossamer.bench.claims.verdict import (
    Judgement,
    all_of,
    apart,
    at_least,
    at_most,
    banded,
    better,
    counted,
    gaps,
    no_worse,
    ratios,
    slope_within,
    times,
    within,
)


def seeds(*values: float) -> dict[int, float]:
    return {30 + i: v for i, v in enumerate(values)}


# The mean of (0, 1, 2) is 1, and its bounds are 2.920 / sqrt(3) = 1.686 away; those of (0, 1, 2, 3, 4) 2.132 sqrt(2.5 / 5).
@pytest.mark.parametrize(
    ("judgement", "verdict"),
    [
        (no_worse(seeds(0, 1, 2), 2.687), "holds"),
        (no_worse(seeds(0, 1, 2), 2.685), "partly"),
        (no_worse(seeds(0, 1, 2), 1.0), "partly"),
        (no_worse(seeds(0, 1, 2), 0.999), "not"),
        (no_worse(seeds(0, 1, 2, 3, 4), 3.508), "holds"),
        (no_worse(seeds(0, 1, 2, 3, 4), 3.507), "partly"),
        (no_worse(seeds(0, 0, 0), 0.0), "holds"),
        (better(seeds(1.7, 2.7, 3.7)), "holds"),
        (better(seeds(0, 1, 2)), "partly"),
        (better(seeds(0, 0, 0)), "not"),
        (better(seeds(-2, -1, 0)), "not"),
        (better(seeds(0.6, 1.6, 2.6, 3.6, 4.6)), "holds"),
        (times(seeds(9, 9, 9), 10), "holds"),
        (times(seeds(8.9, 8.9, 8.9), 10), "partly"),
        (times(seeds(1.0, 1.0, 1.0), 10), "not"),
        (times(seeds(2, 3, 4), 1.5), "partly"),
        (times(seeds(0, 10, 2), 1.0), "not"),
        (at_most(seeds(0, 1, 2), 2.687), "holds"),
        (at_most(seeds(0, 1, 2), 2.685), "partly"),
        (at_most(seeds(0, 1, 2), 0.999), "not"),
        (at_least(seeds(0, 1, 2), -0.687), "holds"),
        (at_least(seeds(0, 1, 2), -0.685), "partly"),
        (at_least(seeds(0, 1, 2), 1.001), "not"),
        (within(seeds(1, 2), 1, 2), "holds"),
        (within(seeds(1, 3), 1, 2), "partly"),
        (within(seeds(3, 4), 1, 2), "not"),
        (within(seeds(1, 2), -math.inf, 2), "holds"),
        (slope_within(seeds(0, 0.01, 0.02), -0.1, 0.1), "holds"),
        (slope_within(seeds(0.0, 0.1, 0.2), -0.1, 0.1), "partly"),
        (slope_within(seeds(1, 1.01, 1.02), -0.1, 0.1), "not"),
        (better(seeds(1)), "waiting"),
        (better({}), "waiting"),
        (within({}, 0, 1), "waiting"),
    ],
)
def test_every_branch(judgement: Judgement, verdict: str) -> None:
    assert judgement.verdict == verdict, judgement.found


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "judge", [lambda d: no_worse(d, 1.0), better, lambda d: times(d, 2.0), lambda d: slope_within(d, -1, 1)]
)
def test_a_run_that_is_not_finite_is_not_and_says_which(judge, bad: float) -> None:
    found = judge(seeds(1.0, bad, 1.0))
    assert found.verdict == "not"
    assert found.found == "not a finite number with seed 31"
    assert found.effect is None


def test_a_value_that_is_no_number_lies_in_no_range() -> None:
    found = within(seeds(1.0, math.nan), 0, 2)
    assert found.verdict == "partly"
    assert "seed 31" in found.found


def test_several_conditions() -> None:
    holds, partly, fails = better(seeds(1, 1, 1)), better(seeds(0, 1, 2)), better(seeds(-1, -1, -1))
    assert all_of({"x": holds}).verdict == "holds"
    assert all_of({"x": holds, "y": partly}).verdict == "partly"
    assert all_of({"x": partly, "y": fails}).verdict == "not"
    assert all_of({"x": fails, "y": better({})}).verdict == "waiting"
    assert all_of({}).verdict == "waiting"
    three = {"x": holds, "y": partly, "z": fails}
    assert [counted(three, h, p).verdict for h, p in ((1, 2), (2, 2), (2, 3))] == ["holds", "partly", "not"]


def test_a_statement_of_time_holds_only_in_the_whole_band() -> None:
    holds, partly, fails = better(seeds(1, 1, 1)), better(seeds(0, 1, 2)), better(seeds(-1, -1, -1))
    assert banded(holds, holds, holds).verdict == "holds"
    assert banded(holds, holds, partly).verdict == "partly"
    assert banded(holds, fails, holds).verdict == "partly"
    assert banded(partly, holds, holds).verdict == "partly"
    assert banded(fails, holds, holds).verdict == "not"
    assert banded(better({}), holds, holds).verdict == "waiting"


def test_what_is_judged_is_paired_by_seed() -> None:
    one, other, start = {30: 3.0, 31: 4.0}, {31: 2.0, 30: 1.0}, {30: 5.0, 31: 2.0}
    assert apart(one, other) == {30: 2.0, 31: 2.0}
    assert ratios(one, other) == {30: 3.0, 31: 2.0}
    found = gaps(one, other, start)
    assert found[30] == 0.5
    assert math.isnan(found[31])  # the reference made no progress, so there is none to lose


@pytest.mark.parametrize("count", [3, 5])
def test_dense_beside_dense_is_no_worse_and_hardly_ever_shown_to_be_better(count: int) -> None:
    """200 draws of differences that are noise: each bound is wrong in 5 % of them (binomial; 14 or fewer wrong has 92 %)."""
    draws = noise(count)
    assert sum(no_worse(d, 0.02).verdict == "holds" for d in draws) >= 0.93 * 200
    assert sum(better(d).verdict != "holds" for d in draws) >= 0.93 * 200
    assert {no_worse(dict.fromkeys(d, 0.0), 0.02).verdict for d in draws} == {"holds"}
    assert {better(dict.fromkeys(d, 0.0)).verdict for d in draws} == {"not"}  # the very same run, paired by seed


@pytest.mark.parametrize("count", [3, 5])
def test_of_two_equal_contenders_one_is_better_in_the_mean_half_of_the_time(count: int) -> None:
    """So `better` cannot be `not` in nearly all draws: it is where the mean is not above 0. 200 fair draws, 75 to 125: 99.9 %."""
    found = [better(d).verdict for d in noise(count)]
    assert 75 <= found.count("not") <= 125
    assert found.count("partly") > found.count("holds")


def noise(count: int) -> list[dict[int, float]]:
    """200 draws of `count` differences between runs that differ in nothing but their seeds."""
    rng = torch.Generator().manual_seed(2)
    return [seeds(*(torch.randn(count, generator=rng) * 0.002).tolist()) for _ in range(200)]
