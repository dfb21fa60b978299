"""DIANA reaches the optimum, whatever unbiased codec and exchange it is around."""

import pytest
import torch
from tests.memories.convex import DIMENSIONS, TERNARY, Problem, tuned

QUICK = Problem(kappa=8.0, workers=4)
slow = pytest.mark.slow  # others of the same: that they balance their books, as all do, is a law that is always tried
EUCLID = f"qsgd(bits=2, bucket={DIMENSIONS}, norm='l2')"


def distance(problem: Problem, recipe: str, rate: float, steps: int) -> float:
    return problem.train(problem.ranks(recipe, rate), steps)


def reaches(recipe: str, rate: float, within: int, goal: float) -> bool:
    ranks = QUICK.ranks(recipe, rate)
    return any(QUICK.train(ranks, 50) < goal for _ in range(within // 50))


@pytest.mark.parametrize(
    "codec",
    [
        TERNARY,
        *(pytest.param(c, marks=slow) for c in (EUCLID, "qsgd(bits=4, bucket=8)", "ternary(clip=0.0)")),
        "qsgd(bits=1, bucket=4)",
    ],
)
def test_every_unbiased_codec_reaches_the_optimum_with_it_and_none_does_without(codec: str) -> None:
    alpha, rate = tuned(QUICK, codec)
    assert reaches(f"gather({codec}) + diana(alpha={alpha})", rate, within=600, goal=1e-13)
    assert distance(QUICK, f"gather({codec})", rate, 80) > 1e-4


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(f"gather({TERNARY})", marks=slow),
        "allreduce(ternary(clip=0.0))",
        pytest.param("allreduce(fp32())", marks=slow),
    ],
)
def test_it_chooses_a_rate_itself(recipe: str) -> None:
    _, rate = tuned(QUICK, TERNARY)
    assert reaches(f"{recipe} + diana()", rate, within=350, goal=1e-20)


@pytest.mark.parametrize("codec", ["qsgd(bits=4, bucket=8)", pytest.param(TERNARY, marks=slow)])
def test_it_reaches_the_optimum_in_two_phases_too(codec: str) -> None:
    _, rate = tuned(QUICK, TERNARY)
    assert reaches(f"scatter({codec}) + diana()", rate, within=350, goal=1e-20)
    assert distance(QUICK, f"scatter({codec})", rate, 50) > 1e-4


def test_with_momentum_it_reaches_the_optimum() -> None:
    alpha, rate = tuned(QUICK, TERNARY)
    assert reaches(f"gather({TERNARY}) + diana(alpha={alpha}, momentum=0.9)", rate / 10, within=500, goal=1e-14)


def test_the_proximal_step_finds_the_exact_support() -> None:
    problem = Problem(kappa=8.0, l1=0.02, workers=4)
    alpha, rate = tuned(problem, TERNARY)
    ranks = problem.ranks(f"gather({TERNARY}) + diana(alpha={alpha}) + every_step(l1=0.02)", rate)
    support = problem.optimum != 0
    assert 5 < int(support.sum()) < 35
    assert problem.train(ranks, 400) < 1e-20
    assert torch.equal(ranks[0].flat() != 0, support)
    bare = problem.ranks(f"gather({TERNARY}) + every_step(l1=0.02)", rate)
    assert problem.train(bare, 80) > 1e-3


def test_what_it_learns_are_the_gradients_at_the_optimum() -> None:
    alpha, rate = tuned(QUICK, TERNARY)
    ranks = QUICK.ranks(f"gather({TERNARY}) + diana(alpha={alpha})", rate)
    QUICK.train(ranks, 400)
    for i, rank in enumerate(ranks):
        expected = QUICK.slope(QUICK.optimum, i)
        assert float(expected.norm()) > 0.1  # the workers do not agree, so there is something to learn
        torch.testing.assert_close(rank.worker.buckets[0].states["memory"]["own"], expected, rtol=0, atol=1e-10)
