"""DIANA's own tests: it learns every worker's gradient and reaches the optimum where quantised gradients stall."""

import pytest
import torch
from tests.laws.blocks import block
from tests.laws.crew import Crew, mean
from tests.memories.convex import TERNARY, Problem, tuned

from gossamer.codecs import QSGD, Ternary
from gossamer.core.block import Layout
from gossamer.memories import DIANA


@pytest.mark.parametrize(("dimensions", "alpha"), [(4, 0.6667), (16, 0.4), (64, 0.2222)])
def test_it_follows_at_the_rate_of_the_theory(dimensions: int, alpha: float) -> None:
    layout = Layout.of({"x": (dimensions,)})
    for codec in (Ternary(clip=0.0), QSGD(2, dimensions)):
        assert DIANA().follow(codec.omega(layout)) == pytest.approx(alpha, abs=1e-4)
    assert DIANA().follow(QSGD(2, dimensions, "l2").omega(layout)) == pytest.approx(dimensions**-0.5)
    assert DIANA(alpha=0.3).follow(7.0) == 0.3


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
