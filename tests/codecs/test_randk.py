"""Random-k: the same places on all ranks, each element with the chance that uniform draws give it."""

from itertools import pairwise

import pytest
import torch
from tests.laws.blocks import agree, block, context, sent, vector
from tests.laws.crew import Crew, mean
from tests.memories.convex import DIMENSIONS, Problem

from gossamer.codecs import RandK
from gossamer.core.bucket import Layout
from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe

STEPS = 1500


def drawn(codec: RandK, x: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    given = vector(x)
    return torch.stack([agree([codec.average(given, {}, context(step=s))])[0][0].mean for s in range(steps)])


@pytest.mark.parametrize(("numel", "ratio"), [(40, 0.1), (41, 0.25)])
def test_scaled_it_is_unbiased_with_the_variance_of_the_formula(numel: int, ratio: float) -> None:
    """z < 5 at each element: a right codec fails once in 40,000 times; the variance is sum (run - 1) x^2, within 10 %."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    draws = drawn(RandK(ratio, scaled=True), x)
    spread = draws.std(0)
    assert float(((draws.mean(0) - x) / (spread / STEPS**0.5)).abs().max()) < 5
    variance = float((draws - x).square().sum(1).mean())
    count = -(-int(ratio * numel * 100) // 100)
    bounds = [i * numel // count for i in range(count + 1)]
    expected = sum((b - a - 1) * float(x[a:b].square().sum()) for a, b in pairwise(bounds))
    assert variance == pytest.approx(expected, rel=0.1)
    assert RandK(ratio, scaled=True).omega(Layout.of({"x": (numel,)})) == max(b - a for a, b in pairwise(bounds)) - 1


def test_without_scaling_one_of_each_run_travels_as_it_is_and_the_same_on_all_ranks() -> None:
    blocks = [block("long", seed=r) for r in range(3)]
    echoes, ledger = agree([RandK(0.05).average(b, {}, context(r, 3)) for r, b in enumerate(blocks)])
    masks = [sent(e, b) != 0 for e, b in zip(echoes, blocks, strict=True)]
    assert all(torch.equal(m, masks[0]) for m in masks)
    assert int(masks[0].sum()) == 65
    torch.testing.assert_close(echoes[0].mean, masks[0] * mean(blocks).float())
    assert {e.handed for e in ledger} == {4 * (65 + 1)}


def test_every_element_gets_through_in_time() -> None:
    crew, seen = Crew("allreduce(randk(ratio=0.1)) + error_feedback()", 2), torch.zeros(1283, dtype=torch.bool)
    for _ in range(150):  # an element misses all of them once in 10^7 times
        seen |= crew.step([block("long", seed=r) for r in range(2)]) != 0
    assert seen.all()


@pytest.mark.slow
def test_around_it_diana_reaches_the_optimum_where_it_stalls_alone() -> None:
    problem = Problem(kappa=8.0, workers=4)
    omega = RandK(0.2, scaled=True).omega(Layout.of({"x": (DIMENSIONS,)}))
    rate = 1 / (problem.kappa * problem.ridge * (1 + 6 * omega))  # draws are alike: no mean over ranks makes them less
    exchange = "allreduce(randk(ratio=0.2, scaled=True))"
    assert problem.train(problem.ranks(f"{exchange} + diana()", rate), 2500) < 1e-12
    assert problem.train(problem.ranks(exchange, rate), 300) > 1e-4


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            "allreduce(randk(ratio=0.0)) + error_feedback()",
            r"ratio must lie in \(0, 1\], got 0.0; 0.01 sends one percent",
        ),
        ("allreduce(randk(ratio=1.1)) + error_feedback()", "got 1.1"),
        ("allreduce(randk())", "without error feedback"),
        ("allreduce(randk(scaled=True)) + error_feedback()", "can diverge"),
        ("gather(randk())", r"use allreduce\(randk\(\)\)"),
    ],
)
def test_what_is_wrong_is_refused(recipe: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Recipe.of(recipe)
