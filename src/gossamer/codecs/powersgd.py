"""PowerSGD: a matrix becomes the product of two thin ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.core.block import Block, Layout, Segment, State
from gossamer.core.contracts import Echo, LinearCodec, Policy, Seat
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program, all_reduce


@final
@part("powersgd")
class PowerSGD(LinearCodec):
    """PowerSGD: one step of power iteration per training step, started where the last one ended.

    M_i in R^(n x m), first dimension by the rest:  P = orth(sum_i M_i Q),  Q_i = M_i^T P,  Q = mean_i Q_i,  mean = P Q^T.
    What got through of mine is P Q_i^T (not the mean: a residual against the mean grows without bound on unequal data).
    Tensors with fewer than two dimensions, and matrices that would not shrink `min_ratio` times, travel as they are.

    Use: on large matrices, where a few directions hold most of the gradient; with `error_feedback()`.

    Not for: vectors and small matrices, which travel as they are, nor processors with no time for matrix products.

    Wire: all-reduces of 4 r (n + m) bytes a matrix, in two messages for the whole block. P and Q are kept transposed, and
    matrices of one shape go through one batched product.

    >>> from gossamer.core.draw import Draw
    >>> from gossamer.core.verbs import AllReduce
    >>> block = Block.of({"w": torch.outer(torch.arange(8.0), torch.ones(8))})
    >>> program = PowerSGD(rank=1).average(block, {}, Seat(0, 1, 1, Draw(0, 1, 0)))
    >>> p = next(program); q = program.send(p.tensor); p.tensor.numel(), q.tensor.numel()
    (8, 8)

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019.
    """

    rank: int = 4
    min_ratio: float = 2.0

    def __post_init__(self) -> None:
        require(self.rank >= 1, f"powersgd: rank must be at least 1, got {self.rank}; the paper uses 1 to 4")
        require(self.min_ratio >= 1, f"powersgd: min_ratio must be at least 1, got {self.min_ratio}; 2 is usual")

    @property
    def unbiased(self) -> bool:
        return False

    @property
    def bucket_mb(self) -> float:
        return 100.0  # its messages are so small that latency and packet headers are what a bucket costs

    def omega(self, layout: Layout) -> float:
        return float("inf")

    def policy(self, key: str) -> Policy:
        return "equal" if key.startswith("q:") else "mean"

    def average(self, block: Block, state: State, seat: Seat) -> Program[Echo]:
        groups, plain = _groups(block.layout.segments, self.rank, self.min_ratio)
        places = _places(plain, block.flat.device)  # of what travels as it is: many vectors, so one operation for all
        starts = [_warm_start(g, state, seat, block.flat) for g in groups]
        thin = [g.project(block.flat, q) for g, q in zip(groups, starts, strict=True)]
        rest = block.flat.index_select(0, places)
        *summed, dense = yield from _all_reduce_together([*thin, rest])
        bases = [_orthogonal(p) for p in summed]
        own = [g.represent(block.flat, p) for g, p in zip(groups, bases, strict=True)]
        means = yield from _all_reduce_together(own)

        mean = block.for_mean()
        largest = [kernels.divide(dense, seat.size).max().double()] if plain else []
        mean.index_copy_(0, places, dense)
        for g, p, q, old in zip(groups, bases, means, starts, strict=True):
            q /= seat.size
            g.write(p, q, mean)
            largest.append(2 * g.rank * _remember(g, q, old, state))  # no number in P exceeds one, but for rounding

        def add_sent(into: Tensor, weight: float) -> None:
            into.index_add_(0, places, rest, alpha=weight)
            for g, p, q in zip(groups, bases, own, strict=True):
                g.add(p, q, into, weight)

        return Echo(mean, add_sent, torch.stack(largest).max() if largest else None)


@lru_cache(maxsize=1024)
def _groups(
    segments: tuple[Segment, ...], most: int, min_ratio: float
) -> "tuple[list[_Group], tuple[tuple[int, int], ...]]":
    """Matrices worth compressing, those of one shape together; and where the segments begin and end that travel as they are."""
    by_shape = dict[tuple[int, int], list[Segment]]()
    plain = list[tuple[int, int]]()
    for s in segments:
        n, m = (s.shape[0], s.numel // max(s.shape[0], 1)) if len(s.shape) > 1 else (0, 0)
        rank = min(n, m, most)
        if n * m > 0 and n * m >= min_ratio * rank * (n + m):
            by_shape.setdefault((n, m), []).append(s)
        elif s.numel:
            plain.append((s.offset, s.offset + s.numel))
    return [_Group(n, m, min(n, m, most), tuple(ss)) for (n, m), ss in by_shape.items()], tuple(plain)


@lru_cache(maxsize=1024)
def _places(runs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The elements of these runs; made once, on the host."""
    elements = [torch.arange(a, b) for a, b in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *elements]).to(device)


@dataclass(frozen=True)
class _Group:
    """Matrices of one shape, and the rank they are squeezed to."""

    n: int
    m: int
    rank: int
    segments: tuple[Segment, ...]

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """The matrices, where they lie: each pass over them is made in place, for a copy costs as much as the product."""
        for s in self.segments:
            yield flat[s.offset : s.offset + s.numel].view(self.n, self.m)

    def project(self, flat: Tensor, q: Tensor) -> Tensor:
        """P^T = Q^T M^T: the thin factor stays contiguous along its long side, which is several times faster."""
        thin = q.new_empty(len(self.segments), self.rank, self.n)
        for matrix, start, out in zip(self.views(flat), q, thin, strict=True):
            torch.mm(start, matrix.t(), out=out)
        return thin

    def represent(self, flat: Tensor, p: Tensor) -> Tensor:
        """Q^T = P^T M: the matrices in the basis that all ranks agreed on."""
        own = p.new_empty(len(self.segments), self.rank, self.m)
        for matrix, basis, out in zip(self.views(flat), p, own, strict=True):
            torch.mm(basis, matrix, out=out)
        return own

    def write(self, p: Tensor, q: Tensor, flat: Tensor) -> None:
        for view, basis, factor in zip(self.views(flat), p, q, strict=True):
            torch.mm(basis.t(), factor, out=view)

    def add(self, p: Tensor, q: Tensor, flat: Tensor, weight: float) -> None:
        for view, basis, factor in zip(self.views(flat), p, q, strict=True):
            view.addmm_(basis.t(), factor, alpha=weight)


def _warm_start(group: _Group, state: State, seat: Seat, like: Tensor) -> Tensor:
    """Last step's Q^T; rows that are missing (first step, higher rank) are drawn with the dice all ranks share."""
    rows = list[Tensor]()
    for s in group.segments:
        q = state.get(f"q:{s.name}")
        if q is None or q.shape[0] < group.rank:
            fresh = seat.draw.shared_normal(f"{s.name}/powersgd", group.rank, group.m).to(like)
            q = fresh if q is None else torch.cat([q, fresh[q.shape[0] :]])
        rows.append(q[: group.rank])
    return torch.stack(rows)


def _remember(group: _Group, q: Tensor, old: Tensor, state: State) -> Tensor:
    """Keep Q for the next step; returns its largest magnitude."""
    # A gradient that was zero this step must not erase the direction found before.
    tops = q.abs().amax(dim=(1, 2), keepdim=True)
    for s, kept in zip(group.segments, torch.where(tops != 0, q, old), strict=True):
        state[f"q:{s.name}"] = kept
    return tops.max().double()


def _orthogonal(p: Tensor) -> Tensor:
    """Orthonormal rows. Householder QR: safe for zero and for nearly dependent rows, where Gram-Schmidt is not.

    The rows are brought to unit size first, so that tiny gradients do not fall below what QR takes for zero.
    """
    largest = p.abs().amax(dim=(1, 2), keepdim=True)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    return torch.linalg.qr((p / safe).transpose(1, 2))[0].transpose(1, 2).contiguous()


def _all_reduce_together(tensors: list[Tensor]) -> Program[list[Tensor]]:
    """One message for many tensors."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    total = yield from all_reduce(flat)
    pieces = total.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
