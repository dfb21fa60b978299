"""The hash of element indices, and stochastic rounding with it; in int64, because torch has no 32-bit unsigned arithmetic."""

import torch
from torch import Tensor

from gossamer.core.rng import Key

Words = Key | tuple[Tensor, Tensor]  # two numbers, or two tensors of one number each, where a key comes on a wire
_WORD = 0xFFFFFFFF


def mix3(counter: Tensor, key: Words) -> Tensor:
    """Uniform 32-bit words from counters (int32 or int64) and a key of two words, as an int64 tensor.

    The key must itself be hashed from (seed, step, rank, name): neighbouring raw keys give correlated words.
    """
    x = (counter.long() + key[0]) & _WORD
    x ^= x >> 17
    x = (x * 0xED5AD4BB) & _WORD
    x ^= x >> 11
    x = (x + key[1]) & _WORD
    x = (x * 0xAC4C1B51) & _WORD
    x ^= x >> 15
    x = (x * 0x31848BAB) & _WORD
    x ^= x >> 14
    return x


def fractions(n: int, key: Key, device: torch.device) -> Tensor:
    """23 random bits for each of n elements; int32."""
    return (mix3(torch.arange(n, dtype=torch.int64, device=device), key) >> 9).int()


def fixed_point(x: Tensor, top: int) -> Tensor:
    """x as int32, 23 bits of which are its fraction, clamped to [-top, top]; NaN ends at the top."""
    x = torch.where(x < top, x, float(top))
    return torch.where(x > -top, x, float(-top)).int()
