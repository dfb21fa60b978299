"""Conversion of floats to fixed point with 23 fraction bits."""

from __future__ import annotations

import torch
from torch import Tensor


def fixed_point(x: Tensor, top: int) -> Tensor:
    """int32 values clamped to [-top, top]; NaN ends at the top."""
    x = torch.where(x < top, x, float(top))
    return torch.where(x > -top, x, float(-top)).int()
