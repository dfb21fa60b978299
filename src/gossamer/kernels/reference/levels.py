"""Uniform levels per bucket, of any number."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.layout import ONE
from gossamer.kernels.reference.hashing import fractions
from gossamer.kernels.reference.rounding import fixed_point


def codes(x: Tensor, levels: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    n, top = x.numel(), levels * ONE
    fixed = fixed_point(x * gains.repeat_interleave(bucket)[:n], top)
    return ((fixed + top + fractions(n, key, offset, x.device)) >> 23).to(torch.uint8)
