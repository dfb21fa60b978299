"""Average or broadcast tensors in full precision: each rank computes one piece and sends it to the others."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.verbs import Program, all_to_all


class SameDtype(NamedTuple):
    """The tensors of one dtype, concatenated."""

    dtype: torch.dtype
    places: tuple[int, ...]  # indices of the tensors
    lengths: tuple[int, ...]

    def whole(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[i].detach().reshape(-1) for i in self.places])

    def whose(self, device: torch.device) -> Tensor:
        """Return the tensor index of each element."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.tensor(self.places, device=device).repeat_interleave(lengths)


class BufferPieces:
    """Cuts tensors into one piece per dtype and owner, of nearly equal lengths."""

    def __init__(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        by_type = dict[torch.dtype, list[int]]()
        for i, tensor in enumerate(tensors):
            by_type.setdefault(tensor.dtype, []).append(i)
        # The widest dtype first, so that each begins at an aligned offset of the wire.
        types = sorted(by_type, key=lambda dtype: -dtype.itemsize)
        self.kinds = [SameDtype(t, tuple(by_type[t]), tuple(tensors[i].numel() for i in by_type[t])) for t in types]
        self.owners = owners

    def cut(self, owner: int) -> list[slice]:
        """Return the slice of an owner's piece for each kind; empty slices for a rank that owns none."""
        if owner not in self.owners:
            return [slice(0, 0) for _ in self.kinds]
        k, n = self.owners.index(owner), len(self.owners)
        return [slice(sum(kind.lengths) * k // n, sum(kind.lengths) * (k + 1) // n) for kind in self.kinds]

    def length(self, owner: int) -> int:
        """Return the bytes of an owner's pieces."""
        return sum((s.stop - s.start) * kind.dtype.itemsize for kind, s in zip(self.kinds, self.cut(owner)))

    def read(self, wire: Tensor, owner: int) -> list[Tensor]:
        """Read an owner's pieces from a wire, one for each kind."""
        parts, at = list[Tensor](), 0
        own = wire.clone()  # a received wire may be unaligned
        for kind, s in zip(self.kinds, self.cut(owner)):
            length = (s.stop - s.start) * kind.dtype.itemsize
            parts.append(own[at : at + length].view(kind.dtype))
            at += length
        return parts


def mean_of(
    tensors: Sequence[Tensor], said: Tensor, weights: Sequence[float], rank: int
) -> Program[tuple[list[Tensor], list[Tensor]]]:
    """Return the weighted means over all ranks, computed in double precision and rounded once, and each rank's bytes `said`.

    The mean of a tensor leaves out ranks where it is not finite; if no rank is left, the mean is not finite.
    """
    size = len(weights)
    pieces = BufferPieces(tensors, range(size))
    fine = torch.stack([t.isfinite().all() for t in tensors]).view(torch.uint8)
    wholes = [kind.whole(tensors) for kind in pieces.kinds]
    wires = [torch.cat([*_bytes(wholes, pieces.cut(j)), fine, said]) for j in range(size)]
    received = yield from all_to_all(wires, [wires[rank].numel()] * size)
    mine, extra = pieces.length(rank), len(tensors)
    finite = [wire[mine : mine + extra] for wire in received]
    parts = [pieces.read(wire[:mine], rank) for wire in received]
    means = list[Tensor]()
    for k, (kind, cut) in enumerate(zip(pieces.kinds, pieces.cut(rank))):
        whose = kind.whose(said.device)[cut]
        means.append(_mean([part[k] for part in parts], [f.double()[whose] * w for f, w in zip(finite, weights)]))
    gathered = yield from _gathered(pieces, means, rank, size, range(size))
    return _apart(pieces, tensors, gathered), [wire[mine + extra :].clone() for wire in received]


def first_of(
    tensors: Sequence[Tensor], said: Tensor, rank: int, size: int
) -> Program[tuple[list[Tensor], list[Tensor]]]:
    """Return rank 0's tensors, bit for bit, and each rank's bytes `said`.

    Each other rank forwards one piece, so that no rank sends much more than the size of the tensors.
    """
    pieces = BufferPieces(tensors, range(1, size))
    wholes = [kind.whole(tensors) for kind in pieces.kinds]
    wires = [torch.cat([*(_bytes(wholes, pieces.cut(j)) if rank == 0 else []), said]) for j in range(size)]
    mine, extra = pieces.length(rank), said.numel()
    received = yield from all_to_all(wires, [(mine if j == 0 else 0) + extra for j in range(size)])
    parts = pieces.read(received[0][:mine], rank)
    gathered = yield from _gathered(pieces, parts, rank, size, range(1, size))
    values = [t.detach() for t in tensors] if rank == 0 else _apart(pieces, tensors, gathered)
    return values, [wire[-extra:].clone() for wire in received]


def _gathered(
    pieces: BufferPieces, mine: Sequence[Tensor], rank: int, size: int, to: Sequence[int]
) -> Program[list[list[Tensor]]]:
    """Send this rank's pieces to the ranks in `to`; return the pieces by owner and kind."""
    wire = torch.cat([m.view(torch.uint8) for m in mine])
    wires = [wire if j in to else wire[:0] for j in range(size)]
    lengths = [pieces.length(j) if rank in to else 0 for j in range(size)]
    received = yield from all_to_all(wires, lengths)
    return [pieces.read(c, j) for j, c in enumerate(received)] if rank in to else []


def _apart(pieces: BufferPieces, tensors: Sequence[Tensor], gathered: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Put the pieces of all ranks together into tensors."""
    out = dict[int, Tensor]()
    for k, kind in enumerate(pieces.kinds):
        whole = torch.cat([parts[k] for parts in gathered])
        out |= {i: v.view(tensors[i].shape) for i, v in zip(kind.places, whole.split(kind.lengths), strict=True)}
    return [out[i] for i in range(len(tensors))]


def _mean(parts: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return the weighted mean, with one weight per element."""
    total = torch.zeros_like(weights[0])
    for part, weight in zip(parts, weights, strict=True):
        total += torch.where(weight > 0, part.double(), 0.0).mul_(weight)
    return (total / sum(weights)).to(parts[0].dtype)


def _bytes(wholes: Sequence[Tensor], cut: Sequence[slice]) -> list[Tensor]:
    return [whole[s].view(torch.uint8) for whole, s in zip(wholes, cut, strict=True)]
