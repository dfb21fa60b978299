"""Stochastic rounding to small codes, shared by all quantisers."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import Bytes, Floats, kernel
from gossamer.kernels.cpu.hashing import fraction
from gossamer.kernels.cpu.hints import wide


@kernel
def round_codes(
    x: Floats, gain: np.float32, top: np.int32, base: np.int32, counter: np.uint32, k1: np.uint32, out: Bytes
) -> None:
    """out = (clamp(int32(x * gain), -top, top) + base + fraction) >> 23; NaN ends at the top."""
    wide()
    limit = np.float32(top)
    for j in range(x.size):
        fixed = np.float32(x[j] * gain)
        fixed = fixed if fixed < limit else limit
        fixed = fixed if fixed > -limit else -limit
        random = fraction(np.uint32(counter + np.uint32(j)), k1)
        out[j] = np.uint8(np.int32(np.int32(np.int32(fixed) + base) + random) >> np.int32(23))
