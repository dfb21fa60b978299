"""The law of updates: what is equal gives equal directions, and nothing comes of nothing."""

import pytest
import torch
from tests.laws.blocks import bits, block, context
from tests.laws.samples import updates

from gossamer.core.contracts import Update

STEPS = 5
every_update = pytest.mark.parametrize("update", updates(), ids=repr)


def walk(update: Update, rank: int, size: int) -> list[bytes]:
    """The directions of some steps, as bits, and what is remembered at the end."""
    state: dict[str, torch.Tensor] = {}
    model, out = block("several", seed=9), list[bytes]()
    for step in range(1, STEPS + 1):
        mean = block("several", seed=step)
        given, kept = mean.flat.clone(), {k: (v, v.clone()) for k, v in state.items()}
        direction = update.direction(mean, model.like(model.flat.clone()), state, context(rank, size, step))
        assert torch.equal(mean.flat, given), "the mean is whoever's it was"
        assert all(torch.equal(v, copy) for v, copy in kept.values()), "state is assigned, never written into"
        assert direction.shape == mean.flat.shape
        assert direction.isfinite().all()
        out.append(bits(direction))
    return [*out, *(bits(state[k]) for k in sorted(state))]


@every_update
def test_equal_means_give_equal_directions_whoever_asks(update: Update) -> None:
    assert walk(update, 0, 4) == walk(update, 3, 4) == walk(update, 0, 4)


@every_update
def test_a_gradient_of_zeros_gives_zeros(update: Update) -> None:
    nothing = block("several").like(torch.zeros_like(block("several").flat))
    assert not update.direction(nothing, block("several", seed=9), {}, context(0, 2, 1)).any()
