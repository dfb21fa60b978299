"""Wires: contiguous uint8 tensors: packed, checked before they are read, made just before they are sent, read as they come."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.core.errors import WireError
from gossamer.core.lazy import LazySequence

T = TypeVar("T")


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


# -- wires of a request: made late, and read as they come ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LazyWire:
    """A wire of known length that is made just before it is sent, while the one before it travels."""

    make: Callable[[], Tensor]
    length: int

    def numel(self) -> int:
        return self.length

    def keep(self) -> Tensor:
        wire = self.make()
        if wire.numel() != self.length:
            raise WireError(f"a LazyWire declared {self.length} bytes, and its function made {wire.numel()}")
        return wire


class LazyWires(LazySequence[LazyWire]):
    """Wires of known lengths that one function makes, each just before it is sent."""

    def __init__(self, make: Callable[[int], Tensor], lengths: Sequence[int]) -> None:
        self.make, self.lengths = make, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def item(self, index: int) -> LazyWire:
        return LazyWire(partial(self.make, index), self.lengths[index])


def kept(wire: Tensor | LazyWire) -> Tensor:
    return wire.keep() if isinstance(wire, LazyWire) else wire


def send_order(rank: int, size: int) -> list[int]:
    """The order in which a rank makes wires for all others: its own first, then the next rank's, ..."""
    return [(rank + i) % size for i in range(size)]


def receive_order(rank: int, size: int) -> list[int]:
    """The order in which a rank reads the wires received: its own first, then that of the rank before it, ..."""
    return [(rank - i) % size for i in range(size)]


Read = Callable[[int, Tensor], None]


class Reader(ABC):
    """A `read` that can also read all wires at once, for a fabric that has them all.

    Law: `all` leaves the bits that single calls in that order leave.
    """

    @abstractmethod
    def __call__(self, rank: int, wire: Tensor) -> None: ...

    def all(self, order: Sequence[int], wires: Sequence[Tensor]) -> None:
        for rank in order:
            self(rank, wires[rank])


class EqualReader(Reader):
    """A `read` of gathered wires whose outcome is equal on all ranks.

    A fabric that serves several ranks lets one of them read, and the others copy what it has read.
    """

    @abstractmethod
    def copy(self, read: Any) -> bool:
        """Copy what another rank's `read` has read of the same wires; False where that reads them otherwise."""


class GatheredWires(list[Tensor]):
    """Gathered wires, and what ranks that a fabric serves together have made of them.

    What all ranks would compute alike, the first of them computes, and the others copy what `copied` has kept of it.
    """

    def __init__(
        self, wires: Sequence[Tensor], known: dict[Any, tuple[Tensor, Any]], copied: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(wires)
        self.known, self.copied = known, copied


def once(wires: Sequence[Tensor], key: Any, out: Tensor, compute: Callable[[], T]) -> T:
    """Let `compute` write `out` from gathered wires, or copy what another rank has computed of them under this key."""
    if not isinstance(wires, GatheredWires):
        return compute()
    if key not in wires.known:
        found = compute()
        wires.known[key] = wires.copied(out), found
        return found
    written, found = wires.known[key]
    out.copy_(written)
    return found
