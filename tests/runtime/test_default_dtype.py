"""The default type of new tensors is the user's: training does not depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.runtime.gym import Odd, bit_equal, make, parameters, pull, train
from torch import Tensor

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
