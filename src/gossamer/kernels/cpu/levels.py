"""Uniform levels per bucket, of any number, a byte each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Floats, kernel
from gossamer.kernels.cpu.hashing import start
from gossamer.kernels.cpu.rounding import round_codes
from gossamer.kernels.layout import ONE


def codes(x: Tensor, levels: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.uint8)
    counter, k1 = start(key, offset)
    _codes(x.detach().numpy(), bucket, gains.numpy(), np.int32(levels * ONE), counter, k1, out.numpy())
    return out


@kernel
def _codes(x: Floats, bucket: int, gains: Floats, top: np.int32, counter: np.uint32, k1: np.uint32, out: Bytes) -> None:
    for i in range(gains.size):
        a = i * bucket
        round_codes(x, a, min(a + bucket, x.size), gains[i], top, top, counter, k1, out, a)
