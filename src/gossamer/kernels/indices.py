"""Ascending indices as Rice-coded gaps whose parameter adapts every 128 gaps.

Wire: one mode byte. Mode 0: the indices as little-endian int32. Mode 1: one Rice parameter r per block (one byte
each); all low parts, r bits per gap, as one bit stream; all quotients in unary (q zeros and a one) as another.
Bits are numbered from the lowest of each byte, and both streams end on a byte. Keeping the three apart means that
every position but the last stream's is known from the parameters, so a GPU can decode without walking.
"""

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import CorruptWire, require_vector

PLAIN, RICE = 0, 1


def index_encode(indices: Tensor, n: int) -> Tensor:
    """Strictly ascending int32 indices in [0, n) as bytes: Rice-coded gaps, or plain when that is not longer.

    r minimises sum(gap >> r) + count * (r + 1) per block. Reads 4 and writes about 0.3 to 1.5 bytes per index.
    """
    require_vector("indices", indices, torch.int32)
    if not 0 <= n <= 2**31:
        raise ValueError(f"n must be between 0 and 2**31, got {n}")
    return twin("indices", "encode", indices.device)(indices, n)


def index_decode(wire: Tensor, count: int, n: int) -> Tensor:
    """The `count` indices of a wire; anything but strictly ascending indices in [0, n) raises CorruptWire.

    Safe on arbitrary bytes. Reads about 0.3 to 1.5 and writes 4 bytes per index.
    """
    require_vector("wire", wire, torch.uint8)
    if not 0 <= count <= n <= 2**31:
        raise CorruptWire(f"indices: {count} indices cannot lie in [0, {n})")
    if wire.numel() == 0:
        raise CorruptWire("indices: expected at least 1 byte, got 0")
    mode = int(wire[0])
    if mode == PLAIN:
        return _plain(wire, count, n)
    if mode != RICE:
        raise CorruptWire(f"indices: unknown mode {mode}")
    # a Rice wire that could not be shorter than the plain one is not ours; this also bounds the work
    if wire.numel() >= 1 + 4 * count:
        raise CorruptWire(f"indices: expected fewer than {1 + 4 * count} bytes, got {wire.numel()}")
    decoded: Tensor | None = twin("indices", "decode", wire.device)(wire, count, n)
    if decoded is None:
        raise CorruptWire(f"indices: not {count} strictly ascending indices in [0, {n})")
    return decoded


def _plain(wire: Tensor, count: int, n: int) -> Tensor:
    if wire.numel() != 1 + 4 * count:
        raise CorruptWire(f"indices: expected {1 + 4 * count} bytes, got {wire.numel()}")
    indices = wire[1:].clone().view(torch.int32)
    ascending = bool((indices[1:] > indices[:-1]).all())
    if count and not (ascending and int(indices[0]) >= 0 and int(indices[-1]) < n):
        raise CorruptWire(f"indices: not {count} strictly ascending indices in [0, {n})")
    return indices
