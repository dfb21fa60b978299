"""What a kernel says when bytes from another worker cannot be trusted, or its caller broke the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.core.errors import WireError


class CorruptWire(WireError):
    """Received bytes do not have the length or the content that their header and the receiver's shapes demand."""


def require_length(name: str, wire: Tensor, expected: int) -> None:
    """Refuses a wire of the wrong length before anyone reads it."""
    require_vector("wire", wire, torch.uint8)
    if wire.numel() != expected:
        raise CorruptWire(f"{name}: expected {expected} bytes, got {wire.numel()}")


def require_vector(name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Kernels walk raw memory, so what is not a contiguous vector of the right type stops here."""
    if x.dtype != dtype or x.dim() != 1 or not x.is_contiguous():
        found = f"{x.dtype} of shape {tuple(x.shape)}"
        raise TypeError(f"{name} must be a contiguous 1-D {dtype} tensor, got {found}")


def require_count(name: str, x: Tensor, expected: int) -> None:
    """Tables (scales, norms) must have one entry per segment or bucket."""
    if x.numel() != expected:
        raise ValueError(f"{name} must have {expected} entries, got {x.numel()}")
