"""Permutations that are computed where they are asked, and not stored: a data set of 10^9 samples needs no memory for its order."""

from collections.abc import Sequence
from hashlib import blake2b
from math import isqrt
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from gossamer.core.errors import GossamerError

ROUNDS = 8
_MIXERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))

Places = NDArray[np.uint64]


class Source(Protocol):
    """What an `Order` puts in order: a number of samples, and what is handed to the data set for each.

    Law: for each key, the items at the places 0, ..., n - 1 are all samples, each once.
    """

    def __len__(self) -> int: ...
    def items(self, key: str, begin: int, end: int) -> Sequence[Any]:
        """What the data set is asked for at these places of the order that the key draws."""
        ...

    def describe(self) -> str:
        """The samples in a few words, which differ where the samples do."""
        ...


@final
class Permutation:
    """A random permutation of 0, ..., n - 1: a pure function of n and a key.

    A number is written as two digits (l, r) with 0 <= l < a and 0 <= r < b, where a b >= n. Each of 8 rounds adds a hash of one
    digit to the other, l += f(r) mod a or r += f(l) mod b, and so can be undone: a Feistel network. Results of n or more go
    through it again, which ends, since all that are below n come from somewhere.

    >>> permutation = Permutation(10, "seed 7, epoch 0")
    >>> [int(i) for i in permutation(0, 10)]
    [2, 3, 4, 1, 6, 8, 5, 7, 9, 0]

    Paper: Black & Rogaway, Ciphers with Arbitrary Finite Domains (CT-RSA 2002): the generalised Feistel cipher and cycle walking.
    """

    def __init__(self, n: int, key: str) -> None:
        self._n = np.uint64(n)
        left = isqrt(n - 1) + 1
        self._left, self._right = np.uint64(left), np.uint64(-(-n // left))
        digest = blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._keys: Places = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, begin: int, end: int) -> Places:
        """The numbers at the places begin, ..., end - 1."""
        out = self._once(np.arange(begin, end, dtype=np.uint64))
        while (outside := np.nonzero(out >= self._n)[0]).size:
            out[outside] = self._once(out[outside])
        return out

    def _once(self, places: Places) -> Places:
        left, right = places // self._right, places % self._right
        for number in range(ROUNDS):
            key = self._keys[number]
            if number % 2:
                right = (right + _hashed(left, key) % self._right) % self._right
            else:
                left = (left + _hashed(right, key) % self._left) % self._left
        return left * self._right + right


def _hashed(digit: Places, key: np.uint64) -> Places:
    """The finalizer of splitmix64, of all digits at once."""
    with np.errstate(over="ignore"):
        mixed = digit + key
        for shift, mixer in zip(_SHIFTS, _MIXERS):
            mixed = (mixed ^ (mixed >> shift)) * mixer
        return mixed ^ (mixed >> _SHIFTS[2])


@final
class Shuffled:
    """Samples that are known by their numbers 0, ..., n - 1, in another random order for each key."""

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or not 0 < n < 2**62:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GossamerError(f"Order(n): n is the number of samples, such as len(dataset), got {n!r}")
        self._n, self._key = n, ""
        self._permutation = Permutation(n, "")

    def __len__(self) -> int:
        return self._n

    def items(self, key: str, begin: int, end: int) -> list[int]:
        if key != self._key:
            self._key, self._permutation = key, Permutation(self._n, key)
        return self._permutation(begin, end).tolist()

    def describe(self) -> str:
        return f"{self._n} samples"
