"""Random numbers generated on the device: on a GPU nothing is copied from the host."""

from functools import lru_cache
from math import pi

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.core.rng import Key

_WORD = 2.0**-32


def uniform(n: int, key: Key, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) in double precision, from two words each."""
    # Words are whole numbers, and their product with a plain number would have the default precision.
    high, low = kernels.mix3(torch.arange(2 * n, device=device), key).double().view(2, n)
    return ((high + low * _WORD) * _WORD).clamp_(max=1 - 2.0**-53)


def normal(rows: int, columns: int, key: Key, device: torch.device) -> Tensor:
    """Standard normal numbers in single precision (Box and Muller)."""
    size, angle = uniform(2 * rows * columns, key, device).view(2, rows, columns)
    return ((-2 * torch.log1p(-size)).sqrt() * torch.cos(2 * pi * angle)).float()


def signs(rows: int, columns: int, key: Key, device: torch.device) -> Tensor:
    """Random signs, -1 or 1 in single precision, from one bit each."""
    words = kernels.mix3(torch.arange(-(-rows * columns // 32), device=device), key)
    low = words.view(torch.uint8).view(-1, 8)[:, :4].reshape(-1)
    return _of_bytes(device).index_select(0, low.int()).view(-1)[: rows * columns].view(rows, columns)


@lru_cache(maxsize=64)
def _of_bytes(device: torch.device) -> Tensor:
    """The eight signs of each byte. Made on the host and copied, which waits: so any stream may read it."""
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
    return (2 * bits - 1).float().to(device)
