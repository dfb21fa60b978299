"""The hash of one counter; every operation is cast back because Numba widens uint32 arithmetic to 64 bits."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import kernel


@kernel
def fraction(counter: np.uint32, k1: np.uint32) -> np.int32:
    """The top 23 bits of a word."""
    return np.int32(np.uint32(word(counter, k1) >> np.uint32(9)))


@kernel
def word(counter: np.uint32, k1: np.uint32) -> np.uint32:
    """mix3; `counter` has the first key word already added."""
    x = np.uint32(counter ^ np.uint32(counter >> np.uint32(17)))
    x = np.uint32(x * np.uint32(0xED5AD4BB))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(11)))
    x = np.uint32(x + k1)
    x = np.uint32(x * np.uint32(0xAC4C1B51))
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * np.uint32(0x31848BAB))
    return np.uint32(x ^ np.uint32(x >> np.uint32(14)))


def start(key: tuple[int, int], offset: int) -> tuple[np.uint32, np.uint32]:
    """The first counter and the second key word of a run of elements."""
    return np.uint32((key[0] + offset) & 0xFFFFFFFF), np.uint32(key[1])
