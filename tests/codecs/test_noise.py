"""Random numbers of the device have the precision that they promise, and are none of the ends that they exclude."""

import pytest
import torch
from torch import Tensor

from gossamer.codecs.noise import normal, uniform
from gossamer.core.rng import Key

KEY = 0x12345678, 0x9ABCDEF0
CPU = torch.device("cpu")


def test_uniform_numbers_have_double_precision() -> None:
    drawn = uniform(1000, KEY, CPU)
    assert drawn.dtype == torch.float64
    assert bool((drawn != drawn.float().double()).any())


def test_the_largest_words_make_no_one_and_no_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision one word in 2^25 made a uniform number of 1, of which the normal number is infinite."""

    def largest(counter: Tensor, key: Key) -> Tensor:
        return torch.full_like(counter, 2**32 - 1)

    monkeypatch.setattr("gossamer.kernels.mix3", largest)
    assert bool((uniform(4, KEY, CPU) < 1).all())
    assert bool(normal(2, 2, KEY, CPU).isfinite().all())
