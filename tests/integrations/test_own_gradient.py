"""Local gradients in a user's loop: models part and meet, and what is checked, judged and resumed goes by that."""

import copy
from collections.abc import Callable

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, same, small_step
from torch import Tensor

pytestmark = pytest.mark.gang
RECIPE = "local_gradients(ratio=0.1, every=3)" + SMALL


def models(rank: int, size: int, recipe: str) -> tuple[list[Tensor], Tensor]:
    """After each of seven steps, and the model to judge at the end."""
    with attached(recipe) as (model, optimizer, comm):
        after = list[Tensor]()
        for _ in range(7):
            small_step(model, optimizer, comm, rank)
            comm.check_sync()
            after.append(flat(model))
        with comm.consensus():
            judged = flat(model)
        assert same(flat(model), after[-1])
        return after, judged


@pytest.mark.parametrize("size", [2, 4])
def test_models_part_and_meet_and_their_mean_is_judged(gang_of: Callable[[int], Gang], size: int) -> None:
    ranks = gang_of(size).run(models, RECIPE)
    first = ranks[0][0]
    for after, judged in ranks:
        assert [same(a, b) for a, b in zip(after, first, strict=True)][2::3] == [True, True]
        torch.testing.assert_close(judged, torch.stack([r[0][-1] for r in ranks]).mean(0))
    assert not same(ranks[1][0][-1], first[-1])


def resumed(rank: int, size: int, stop: int) -> tuple[Tensor, Tensor]:
    """Six steps at once, and six with a checkpoint after some."""
    with attached(RECIPE) as (model, optimizer, comm):
        for step in range(1, 7):
            small_step(model, optimizer, comm, rank)
            if step == stop:
                parts = model, optimizer, comm
                saved = [copy.deepcopy(part.state_dict()) for part in parts]
        whole = flat(model)
    with attached(RECIPE) as parts:
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)
        for _ in range(6 - stop):
            small_step(*parts, rank)
        return whole, flat(parts[0])


@pytest.mark.parametrize("stop", [2, 3])
def test_it_resumes_bit_for_bit_between_two_averages_and_at_one(gang2: Gang, stop: int) -> None:
    ranks = gang2.run(resumed, stop)
    assert all(same(whole, again) for whole, again in ranks)
    assert same(ranks[0][0], ranks[1][0])
