"""Wires: contiguous uint8 tensors; every read checks the length first."""

import math

import torch
from torch import Tensor

from gossamer.core.errors import WireError


def pack(*pieces: Tensor) -> Tensor:
    """Concatenate tensors as bytes."""
    views = [p.contiguous().view(-1).view(torch.uint8) for p in pieces]
    return views[0] if len(views) == 1 else torch.cat(views)


def expect(wire: Tensor, length: int, what: str) -> None:
    """Raise WireError unless a wire has exactly the expected length."""
    if wire.dtype != torch.uint8 or wire.dim() != 1 or wire.numel() != length:
        raise WireError(
            f"{what}: expected {length} bytes, got {wire.numel()} of {wire.dtype}. "
            "The ranks run different recipes or versions, or the bytes were damaged on the network."
        )


def take(wire: Tensor, dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor]:
    """Read a tensor from the front of a wire; returns it and the rest."""
    length = math.prod(shape) * dtype.itemsize
    if wire.numel() < length:
        raise WireError(f"the wire ends too early: expected {length} bytes of {dtype}, {wire.numel()} left")
    head, rest = wire[:length], wire[length:]
    if head.storage_offset() % dtype.itemsize:
        head = head.clone()  # a view of another width must start on a multiple of it
    return head.view(dtype).view(shape), rest
