"""How many backups pay, and what stale gradients cost: T6.5 and T6.7 of the method notes."""

from math import pi, sin

import pytest
import torch
from torch import nn

from gossamer.backups import plan, recommend
from gossamer.core.errors import RecipeError
from gossamer.simulate import train_on_arrival


@pytest.mark.parametrize(("tail", "backups", "gain"), [(1.0, 31, 1.98), (0.1, 7, 1.12), (0.02, 1, 1.01)])
def test_the_best_number_is_that_of_the_formula(tail: float, backups: int, gain: float) -> None:
    found = plan(100, 1.0, tail)
    assert found.backups == backups
    assert found.gain == pytest.approx(gain, abs=0.006)


def test_what_was_drawn_is_found_again() -> None:
    """4000 times of 1 + Exp(.5): both are found within 5 standard errors, .04 and .0025 (p < 1e-5)."""
    rng = torch.Generator().manual_seed(3)
    rows = (1 + 0.5 * torch.empty(250, 16, dtype=torch.float64).exponential_(generator=rng)).tolist()
    found = recommend(rows)
    assert found.tail == pytest.approx(0.5, abs=0.04)
    assert found.constant == pytest.approx(1.0, abs=0.0025)
    assert found.backups == pytest.approx(plan(16, 1.0, 0.5).backups, abs=1)
    assert found.measured == pytest.approx(found.gain, rel=0.1)
    assert found.recipe == f"backup({found.backups})"


def test_machines_that_are_alike_need_none() -> None:
    found = recommend([[1.0, 1.0, 1.0, 1.0]] * 3)
    assert (found.backups, found.gain, found.recipe) == (0, 1.0, "allreduce")
    assert plan(2, 1.0, 50.0).backups == 0  # of one gradient a step there is no mean


@pytest.mark.parametrize("rows", [[], [[1.0, 2.0], [1.0]], [[1.0, -2.0]], [[1.0, float("nan")]]])
def test_what_are_no_times_is_refused(rows: list[list[float]]) -> None:
    with pytest.raises(RecipeError, match="a row of positive seconds"):
        recommend(rows)


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_stale_gradients_are_stable_up_to_the_sine_bound(size: int) -> None:
    """T6.7: with ranks all alike a gradient is size - 1 updates old; f = x^2 / 2 ends or explodes on either side."""
    bound = 2 * sin(pi / (2 * (2 * (size - 1) + 1)))

    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = x.detach().clone()
        return float(x.detach() ** 2 / 2)

    def final(lr: float) -> float:
        run = train_on_arrival(Point, lambda m: torch.optim.SGD(m.parameters(), lr=lr), size, backward, 1500)
        assert set(run.staleness[size:]) == {size - 1}
        assert run.seconds == -(-1500 // size)
        return max(run.losses[-20:])

    assert final(0.97 * bound) < 1e-3
    assert final(1.03 * bound) > 1e3


def test_a_slow_rank_is_stale_and_the_others_are_not() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.zeros_like(x)
        return float(rank)

    def speed(rank: int, step: int) -> float:
        return 10.0 if rank == 2 else 1.0

    run = train_on_arrival(Point, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 3, backward, 63, speed)
    assert [s for s, rank in zip(run.staleness, run.losses, strict=True) if rank == 2] == [20, 20, 20]
    assert run.seconds == pytest.approx(30.0)
