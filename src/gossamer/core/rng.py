"""Random numbers without state: every draw is a function of (run seed, step, name, rank).

No global generator is touched, so a resumed run needs no generator state, and two libraries never disturb each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

Key = tuple[int, int]
Keys = npt.NDArray[np.uint32]  # a row of two words for each key


@dataclass(frozen=True)
class CounterRng:
    """The random numbers of one rank at one step.

    >>> mine = CounterRng(seed=7, step=3, rank=0)
    >>> mine.key("layer.weight") == CounterRng(7, 3, 1).key("layer.weight")
    False
    >>> mine.shared_key("layer.weight") == CounterRng(7, 3, 1).shared_key("layer.weight")
    True
    """

    seed: int
    step: int
    rank: int

    def key(self, name: str) -> Key:
        """Two hashed 32-bit keys, different on each rank: for rounding, which must be independent."""
        return self._key(name, self.rank)

    def keys(self, names: Sequence[str]) -> Keys:
        """The key of every name.

        >>> CounterRng(7, 3, 1).keys(["layer.weight"]).tolist() == [[*CounterRng(7, 3, 1).key("layer.weight")]]
        True
        """
        start = self._start(self.rank)
        digests = bytearray().join([blake2b(start + name.encode(), digest_size=8).digest() for name in names])
        return np.frombuffer(digests, "<u4").astype(np.uint32, copy=False).reshape(-1, 2)

    def shared_key(self, name: str) -> Key:
        """Two hashed 32-bit keys, equal on all ranks: for supports, hashes and start vectors."""
        return self._key(name, -1)

    def shared_normal(self, name: str, *shape: int) -> torch.Tensor:
        """Standard normal numbers (float32, CPU), equal on all ranks."""
        return torch.randn(*shape, generator=_generator(self.shared_key(name)), dtype=torch.float32, device="cpu")

    def uniform(self, name: str, *shape: int) -> torch.Tensor:
        """Uniform numbers in [0, 1) (float64, CPU), different on each rank."""
        return torch.rand(*shape, generator=_generator(self.key(name)), dtype=torch.float64, device="cpu")

    def again(self) -> "CounterRng":
        """Other random numbers, for a second encoding in the same step."""
        return CounterRng(self.seed ^ 0x5EC0, self.step, self.rank)

    def _key(self, name: str, rank: int) -> Key:
        digest = blake2b(self._start(rank) + name.encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def _start(self, rank: int) -> bytes:
        return f"{self.seed}/{self.step}/{rank}/".encode()


def _generator(key: Key) -> torch.Generator:
    return torch.Generator().manual_seed(key[0] << 31 ^ key[1])
