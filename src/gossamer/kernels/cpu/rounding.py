"""Stochastic rounding to small codes, shared by all quantisers."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import Bytes, Floats, kernel
from gossamer.kernels.cpu.hashing import fraction
from gossamer.kernels.cpu.hints import wide
from gossamer.kernels.layout import TINY


@kernel
def gain_of(scale: np.float32, top: np.float32) -> np.float32:
    """Like `layout.gains` for one scale; divides as torch divides a number by a tensor."""
    return np.float32(0) if scale < np.float32(TINY) else np.float32(np.float32(1) / scale) * top


@kernel
def unit_of(scale: np.float32, weight: np.float32, top: np.float32) -> np.float32:
    """Like `layout.units` for one scale."""
    unit = np.float32(np.float32(scale * weight) / top)
    return np.float32(unit + np.float32(unit - unit))


@kernel
def round_codes(
    x: Floats,
    a: int,
    b: int,
    gain: np.float32,
    top: np.int32,
    base: np.int32,
    start: np.uint32,
    k1: np.uint32,
    out: Bytes,
    begin: int,
) -> None:
    """out[begin:] = (clamp(int32(x[a:b] * gain), -top, top) + base + fraction) >> 23; NaN ends at the top.

    Ranges instead of slices, which count references; unsigned indices, which need no code for negative ones.
    """
    wide()
    limit = np.float32(top)
    counter = np.uint32(start + np.uint32(a))
    for j in range(b - a):
        fixed = np.float32(x[np.uint64(a + j)] * gain)
        fixed = fixed if fixed < limit else limit
        fixed = fixed if fixed > -limit else -limit
        random = fraction(np.uint32(counter + np.uint32(j)), k1)
        out[np.uint64(begin + j)] = np.uint8(np.int32(np.int32(np.int32(fixed) + base) + random) >> np.int32(23))
