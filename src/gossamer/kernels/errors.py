"""Errors of kernels, for corrupt bytes from another rank and for wrong arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.core.errors import WireError


class CorruptWire(WireError):
    """Received bytes do not have the length or content that their header and the receiver's shapes require."""


def require_length(name: str, wire: Tensor, expected: int) -> None:
    """Raise CorruptWire if a wire has the wrong length; called before it is read."""
    require_vector("wire", wire, torch.uint8)
    if wire.numel() != expected:
        raise CorruptWire(f"{name}: expected {expected} bytes, got {wire.numel()}")


def require_vector(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError unless x is a contiguous vector of the right type, since kernels access raw memory."""
    if x.dtype != dtype or x.dim() != 1 or not x.is_contiguous():
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise TypeError(f"{name} must be a contiguous 1-D {dtype} tensor, got {found}")


def require_count(name: str, x: Tensor, expected: int) -> None:
    """Raise ValueError unless a table (scales, norms) has one entry per segment or bucket."""
    if x.numel() != expected:
        raise ValueError(f"{name} must have {expected} entries, got {x.numel()}")
