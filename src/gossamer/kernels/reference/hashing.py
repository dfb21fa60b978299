"""The counter-based hash, in int64 because torch has no 32-bit unsigned arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def mix3(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Three rounds of xor-shift and multiply, with the second key word added after the first round."""
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


def fractions(n: int, key: tuple[int, int], offset: int, device: torch.device) -> Tensor:
    """23 random bits for each of the elements offset, offset + 1, ...; int32."""
    counter = torch.arange(n, dtype=torch.int64, device=device) + offset
    return (mix3(counter, key) >> 9).int()
