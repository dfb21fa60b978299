"""Wires: contiguous uint8 tensors; every read checks the length first."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.core.errors import WireError
from gossamer.core.lazy import LazySequence


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


class WireRows(LazySequence[Tensor]):
    """Wires as the rows of one tensor: wire j is the first `lengths[j]` bytes of row j."""

    def __init__(self, rows: Tensor, lengths: Sequence[int]) -> None:
        self.rows, self.lengths = rows, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def item(self, index: int) -> Tensor:
        return self.rows[index, : self.lengths[index]]


def without(wires: Sequence[Tensor], index: int) -> Sequence[Tensor]:
    """The same wires with an empty one at this index."""
    if isinstance(wires, WireRows):
        return WireRows(wires.rows, [*wires.lengths[:index], 0, *wires.lengths[index + 1 :]])
    return [*wires[:index], wires[index][:0], *wires[index + 1 :]]


def in_order(wires: Sequence[Tensor], order: Sequence[int]) -> Sequence[Tensor]:
    """Those of the wires that have these indices, in this order."""
    if isinstance(wires, WireRows):
        return WireRows(wires.rows[[*order]], [wires.lengths[j] for j in order])
    return [wires[j] for j in order]


def rows_of(wires: Sequence[Tensor], length: int, what: str) -> Tensor:
    """Wires as the rows of one tensor, as wide as they or wider; raises WireError unless each has exactly the expected length."""
    if isinstance(wires, WireRows) and {*wires.lengths} == {length} and length <= wires.rows.shape[1]:
        return wires.rows
    for wire in wires:
        expect(wire, length, what)
    return torch.stack([*wires])
