"""DIANA's own tests: it learns every worker's gradient and reaches the optimum where quantised gradients stall."""

import pytest
import torch
from tests.laws.blocks import block, vector
from tests.laws.crew import Crew, mean
from tests.memories.convex import DIMENSIONS, TERNARY, Problem, tuned

from gossamer.codecs import QSGD, Ternary
from gossamer.core.bucket import Bucket, Layout
from gossamer.memories import DIANA
from gossamer.recipe import Recipe


@pytest.mark.parametrize(("dimensions", "alpha"), [(4, 0.6667), (16, 0.4), (64, 0.2222)])
def test_it_follows_at_the_rate_of_the_theory(dimensions: int, alpha: float) -> None:
    layout = Layout.of({"x": (dimensions,)})
    for codec in (Ternary(clip=0.0), QSGD(2, dimensions)):
        assert DIANA().follow(codec.omega(layout)) == pytest.approx(alpha, abs=1e-4)
    assert DIANA().follow(QSGD(2, dimensions, "l2").omega(layout)) == pytest.approx(dimensions**-0.5)
    assert DIANA(alpha=0.3).follow(7.0) == 0.3


SHARED, OWN = "allreduce(ternary(clip=0.0))", "gather(ternary(clip=0.0))"


def worst(size: int, numel: int) -> list[Bucket]:
    """The gradients that shared scales treat worst: one large element on one rank, and all others of one small size."""
    small = 1 / (1 + (size * numel) ** 0.5)
    flats = [torch.full((numel,), small, dtype=torch.float64) for _ in range(size)]
    flats[0][0] = 1.0
    return [vector(f) for f in flats]


def left(recipe: str, size: int, numel: int, draws: int) -> tuple[float, float]:
    """After one step, what is left to learn of the worst gradients, in shares of them: its mean, and the mean's error."""
    given, shares = worst(size, numel), list[float]()
    total = sum(float(g.flat.square().sum()) for g in given)
    for seed in range(draws):
        crew = Crew(recipe, size, seed=seed)
        crew.step(given)
        shares.append(sum(float((k["own"] - g.flat).square().sum()) for k, g in zip(crew.kept, given)) / total)
    found = torch.tensor(shares)
    return float(found.mean()), float(found.std()) / draws**0.5


@pytest.mark.parametrize(("size", "numel"), [(2, 8), (4, 64), (10, 40)])
def test_with_shared_scales_it_learns_at_the_rate_of_the_theory_from_the_worst_gradients(size: int, numel: int) -> None:
    """At a = 1 / (1 + w), 1 - a of the distance is left, and exactly that from the worst; within 5 standard errors."""
    rate = 2 / (1 + (size * numel) ** 0.5)  # all ranks' elements count, not one rank's
    assert Recipe.of(SHARED).exchange.omega(Layout.of({"x": (numel,)}), size) == pytest.approx(1 / rate - 1)
    mean, error = left(f"{SHARED} + diana()", size, numel, 300)
    assert abs(mean - (1 - rate)) < 5 * error + 1e-6


def test_with_shared_scales_a_rate_for_scales_of_ones_own_would_unlearn() -> None:
    size, numel = 10, 40
    alone = Recipe.of(OWN).exchange.omega(Layout.of({"x": (numel,)}), size)
    mean, error = left(f"{SHARED} + diana(alpha={1 / (1 + alone)})", size, numel, 300)
    assert mean - 5 * error > 1.1
    mean, error = left(f"{OWN} + diana()", size, numel, 300)
    assert mean + 5 * error < 1


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(10, marks=pytest.mark.slow)]
)
def test_with_shared_scales_it_reaches_the_optimum_at_the_step_size_of_the_theory(workers: int) -> None:
    """At rate = 1 / (L (1 + 6 w / N)) and a = 1 / (1 + w), |x - x*|^2 <= V (1 - min(rate mu, a / 2))^steps."""
    problem = Problem(kappa=8.0, workers=workers)
    omega = Recipe.of(SHARED).exchange.omega(Layout.of({"x": (DIMENSIONS,)}), workers)
    rate, a = 1 / (problem.kappa * problem.ridge * (1 + 6 * omega / workers)), 1 / (1 + omega)
    unlike = sum(float(problem.slope(problem.optimum, i).square().sum()) for i in range(workers)) / workers
    v = float(problem.optimum.square().sum()) + 4 * omega / (a * workers) * rate**2 * unlike
    ranks, falls = problem.ranks(f"{SHARED} + diana()", rate), min(rate * problem.ridge, a / 2)
    for steps in (200, 400, 600):
        assert problem.train(ranks, 200) <= v * (1 - falls) ** steps
    assert problem.train(problem.ranks(SHARED, rate), 200) > 1e-4


@pytest.mark.slow  # test_diana_converges.py has the same of a problem of a smaller condition
def test_it_reaches_the_optimum_of_an_ill_conditioned_problem_where_quantised_gradients_stall() -> None:
    problem = Problem(kappa=98.0)
    alpha, rate = tuned(problem, TERNARY)
    ranks = problem.ranks(f"gather({TERNARY}) + diana(alpha={alpha})", rate)
    assert any(problem.train(ranks, 250) <= 1e-20 for _ in range(8))  # within 2000 steps
    stalled = problem.ranks(f"gather({TERNARY})", rate)
    assert all(problem.train(stalled, 100) > 1e-3 for _ in range(3))


@pytest.mark.parametrize("size", [1, 2, 3, 10])
@pytest.mark.parametrize(
    "exchange", ["gather(qsgd(bits=2, bucket=16))", "gather(ternary(clip=0.0))", "allreduce(fp32())"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_common_gradient_is_the_mean_of_the_learned_ones_at_every_step(
    size: int, exchange: str, dtype: torch.dtype
) -> None:
    crew = Crew(f"{exchange} + diana()", size)
    for step in range(12):
        crew.step([block("several", dtype, seed=50 * r + step) for r in range(size)])
        common = crew.kept[0]["common"]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(crew.mean_of("own"), common.double(), rtol=tolerance, atol=tolerance)
        assert all(torch.equal(s["common"], common) for s in crew.kept)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_in_two_phases_the_common_gradient_is_that_mean_but_for_what_is_owed(size: int) -> None:
    crew = Crew("scatter(qsgd(bits=4, bucket=8)) + diana()", size)
    for step in range(12):
        crew.step([block("several", torch.float64, seed=50 * r + step) for r in range(size)])
        assert (crew.mean_of("own") - crew.owed() - crew.kept[0]["common"]).abs().max() < 1e-12


def test_the_answer_is_the_old_common_gradient_and_what_travelled() -> None:
    crew = Crew("gather(qsgd(bits=2, bucket=16)) + diana(alpha=0.25)", 3)
    before = torch.zeros(())
    for step in range(6):
        got = crew.step([block("several", torch.float64, seed=50 * r + step) for r in range(3)])
        assert torch.equal(got, before + crew.echoes[0].mean)
        before = crew.kept[0]["common"]


def test_it_is_right_on_average_from_the_first_step_on() -> None:
    blocks = [block("long", seed=r) for r in range(4)]
    total, draws = torch.zeros(1283, dtype=torch.float64), 200
    for seed in range(draws):
        crew = Crew("gather(qsgd(bits=4, bucket=64)) + diana()", 4, seed=seed)
        for _ in range(3):
            got = crew.step(blocks)
        total += got.double()
    z = (total / draws - mean(blocks)) / (0.5 / draws**0.5)  # 4 bits of buckets of 64 spread far less than 0.5
    assert float(z.abs().max()) < 5


def test_momentum_adds_up_past_answers() -> None:
    plain, heavy = (Crew("allreduce", 2, DIANA(momentum=m)) for m in (0.0, 0.5))
    velocity = torch.zeros(1283, dtype=torch.float64)
    for step in range(5):
        blocks = [block("long", torch.float64, seed=9 * step + r) for r in range(2)]
        velocity = 0.5 * velocity + plain.step(blocks)
        torch.testing.assert_close(heavy.step(blocks), velocity, rtol=1e-12, atol=1e-12)
