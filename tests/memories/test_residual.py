"""What a rank owes goes over to others whole: with its momentum, in units of the gradient, and to one that has none yet."""

import pytest
import torch

from gossamer.core.bucket import State
from gossamer.core.contracts import Memory
from gossamer.memories import EF21, ErrorFeedback, MomentumCorrection


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def test_a_residual_in_units_of_the_update_is_told_in_those_of_the_gradient() -> None:
    memory = ErrorFeedback(units="update")
    mine: State = {"residual": torch.tensor([40.0, 0.0]), "unit": number(20.0)}
    owed = memory.owing(mine)
    assert owed["residual"].tolist() == [2.0, 0.0]
    older: State = {"residual": torch.tensor([0.0, 10.0]), "unit": number(10.0)}
    memory.take_on(older, owed, 0.5)
    assert older["residual"].tolist() == [10.0, 10.0]
    memory.let_go(mine)
    assert not memory.owing(mine)


@pytest.mark.parametrize("memory", [ErrorFeedback(), ErrorFeedback(units="update"), MomentumCorrection()])
def test_a_rank_without_a_residual_takes_on_its_first(memory: Memory) -> None:
    state: State = {}
    memory.take_on(state, {"residual": torch.tensor([3.0])}, 0.5)
    assert memory.owing(state)["residual"].tolist() == [1.5]


def test_momentum_goes_with_the_residual_and_what_others_hold_is_not_written_into() -> None:
    memory, held = MomentumCorrection(), torch.tensor([1.0, 2.0])
    mine: State = {"residual": torch.tensor([1.0, 1.0]), "velocity": torch.tensor([4.0, 0.0])}
    other: State = {"residual": held, "velocity": held}
    memory.take_on(other, memory.owing(mine), 0.5)
    assert other["residual"].tolist() == [1.5, 2.5]
    assert other["velocity"].tolist() == [3.0, 2.0]
    assert held.tolist() == [1.0, 2.0]
    memory.let_go(mine)
    assert mine == {}


def test_an_estimate_of_a_gradient_owes_nothing() -> None:
    memory = EF21(eta=1.0)
    state: State = {"own": torch.ones(2), "common": torch.ones(2)}
    assert memory.owing(state) == {}
    memory.take_on(state, {}, 0.5)
    memory.let_go(state)
    assert set(state) == {"own", "common"}
