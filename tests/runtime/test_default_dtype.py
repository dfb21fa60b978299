"""The default type of new tensors is the user's: training does not depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.gang import Gang
from tests.runtime.gym import Odd, bit_equal, make, parameters, pull, train
from torch import Tensor

import gossamer
from gossamer.bench.catalogue.samples import example
from gossamer.recipes import presets


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def single() -> Odd:
    with default(torch.float32):
        return Odd()


def trained(preset: str) -> list[Tensor]:
    ranks = make(example(preset), 4, single)
    train(ranks, pull, 2)
    return parameters(ranks)


@pytest.mark.parametrize("preset", sorted(presets()))
def test_a_model_in_single_precision_trains_alike_whatever_the_default(preset: str) -> None:
    usual = trained(preset)
    with default(torch.float64):
        found = trained(preset)
    for mine, others in zip(found, usual, strict=True):
        assert bit_equal([mine, others])


WITH_A_CHANGE = ("onebit_lamb(2)", "onebit_adam(2)", "zero_one_adam(2)")  # of what is asked, after a warm-up


def attached(rank: int, size: int, recipe: str, dtype: torch.dtype) -> list[Tensor]:
    """A user's loop on real processes, through the step at which compressed messages begin."""
    with default(dtype):
        torch.manual_seed(rank)
        model = torch.nn.Linear(6, 3, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        comm = gossamer.attach(model, optimizer, recipe)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=generator, dtype=torch.float32)).square().mean().backward()
            optimizer.step()
        comm.finish()
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("recipe", WITH_A_CHANGE)
def test_ranks_change_together_on_real_processes_whatever_the_default(gang2: Gang, recipe: str) -> None:
    usual, found = (gang2.run(attached, recipe, dtype) for dtype in (torch.float32, torch.float64))
    for mine, others in zip(found, usual, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))
