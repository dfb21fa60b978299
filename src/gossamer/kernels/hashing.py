"""The random numbers of all stochastic kernels: a keyed 32-bit hash of the element's index."""

from __future__ import annotations

from torch import Tensor

from gossamer.kernels.reference import hashing

Key = tuple[int, int]


def mix3(counter: Tensor, key: Key) -> Tensor:
    """Uniform 32-bit words from counters (int32 or int64) and a key of two words, as an int64 tensor.

    The key must itself be hashed from (seed, step, rank, name): neighbouring raw keys give correlated words.
    """
    return hashing.mix3(counter, key)
