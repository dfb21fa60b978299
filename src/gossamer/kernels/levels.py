"""Uniform levels, any number of them, as numbers of their own and in a Rice code."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.errors import CorruptWire, require_count, require_vector
from gossamer.kernels.hashing import Key
from gossamer.kernels.indices import index_decode, index_encode

MOST = 2**31 - 1  # the sum over all elements of their codes and ones: they are written as the gaps of indices


def level_codes(x: Tensor, levels: int, bucket: int, norms: Tensor, key: Key, offset: int = 0) -> Tensor:
    """codes = levels + floor(x * levels / norm + u), as uint8, of as many levels on each side of zero as one likes, up to 127.

    To the bit the codes that `quantise_encode` packs, where it has as many levels. Reads 4 and writes 1 byte per element.
    """
    require_vector("x", x)
    require_vector("norms", norms)
    if not 1 <= levels <= 127:
        raise ValueError(f"levels must be between 1 and 127, got {levels}")
    require_count("norms", norms, -(-x.numel() // bucket))
    codes: Tensor = twin("levels", "codes", x.device)(x, levels, bucket, layout.gains(norms, levels), key, offset)
    return codes


def levels_encode(codes: Tensor, levels: int) -> Tensor:
    """Codes of levels around zero as bytes: the nearer to zero the shorter, by a Rice code that adapts every 128 elements.

    0, -1, 1, -2, 2, ... are 0, 1, 2, 3, 4, ..., and these the gaps between indices (`index_encode`).
    """
    require_vector("codes", codes, torch.uint8)
    signed = codes.int() - levels
    folded = torch.where(signed < 0, -2 * signed - 1, 2 * signed)
    return index_encode((folded.add_(1).cumsum(0) - 1).int(), _bound(codes.numel(), levels))


def levels_decode(wire: Tensor, count: int, levels: int) -> Tensor:
    """The levels of a wire, from -levels to levels, as int32; anything else raises CorruptWire. Safe on arbitrary bytes."""
    ends = index_decode(wire, count, _bound(count, levels))
    folded = ends.diff(prepend=ends.new_full((1,), -1)) - 1
    if count and int(folded.max()) > 2 * levels:
        raise CorruptWire(f"levels: more than {levels} of them on a side of zero")
    return torch.where(folded % 2 == 0, folded // 2, -((folded + 1) // 2))


def _bound(count: int, levels: int) -> int:
    return min(count * (2 * levels + 1), MOST)
