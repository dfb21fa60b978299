"""PowerSGD: approximate each matrix by the product of two low-rank factors."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer import kernels
from gossamer.codecs.casts import FP32
from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, Layout, Segment, State
from gossamer.core.contracts import Biased, Context, LinearCodec, Policy, ReduceResult
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange
from gossamer.core.verbs import Program, all_reduce

NEAR = 20  # powers of two around one: factors as large as these are multiplied as they are
SWEEPS = 10  # of the power iteration on a mean that is known, to start from its leading directions


@final
@part("powersgd")
class PowerSGD(Biased, LinearCodec):
    """PowerSGD: low-rank factors by one warm-started step of power iteration per training step.

    M_i in R^(n x m), first dimension by the rest:  P = orth(sum_i M_i Q),  Q_i = M_i^T P,  Q = mean_i Q_i,  mean = P Q^T.
    The sent part of rank i's gradient is P Q_i^T (not the mean: a residual against the mean grows without bound on unequal data).
    Tensors with fewer than two dimensions, and matrices that would not shrink `min_ratio` times, are sent in full.

    `ratio` gives every matrix its own rank, the largest with which it shrinks `ratio` times: r = n m / (ratio (n + m)),
    at least 1. `start="svd"`: the first bucket is sent in full, and the iteration starts from the leading singular vectors
    of its mean; "random" takes about ten steps to find them. `factors="fp16"`: P and Q in half precision, scaled by
    powers of two that follow from the last Q; the first ones are sent in float32.

    Use: on large matrices, where a few directions hold most of the gradient; with `error_feedback()`.

    Not for: vectors and small matrices, which are sent in full, nor busy processors: it multiplies matrices at every step.

    Wire: all-reduces of 4 r (n + m) bytes per matrix, 2 r (n + m) with `factors="fp16"`, in two messages for the whole bucket;
    with fp16 a third message for the tensors sent in full. P and Q are kept transposed.

    >>> from gossamer.core.rng import CounterRng
    >>> from gossamer.core.verbs import AllReduce
    >>> block = Bucket.of({"w": torch.outer(torch.arange(8.0), torch.ones(8))})
    >>> program = PowerSGD(rank=1).average(block, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    >>> p = next(program); q = program.send(p.tensor); p.tensor.numel(), q.tensor.numel()
    (8, 8)

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
    NeurIPS 2019.
    """

    rank: Annotated[int, Choice(1, 2, 4, 8, 16)] = 4
    min_ratio: float = 2.0
    ratio: Annotated[float | None, LogRange(4.0, 64.0)] = None
    start: Annotated[Literal["random", "svd"], Choice("random", "svd")] = "random"
    factors: Literal["fp32", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        if self.ratio is not None:
            require(
                self.rank == 4,
                f"powersgd: ratio={self.ratio} sets the rank of each matrix; pass rank or ratio, not both",
            )
            require(
                self.ratio >= self.min_ratio,
                f"powersgd: ratio must be at least min_ratio, {self.min_ratio}, got {self.ratio}; a smaller one does not pay",
            )
        require(self.rank >= 1, f"powersgd: rank must be at least 1, got {self.rank}; the paper uses 1 to 4")
        require(self.min_ratio >= 1, f"powersgd: min_ratio must be at least 1, got {self.min_ratio}; 2 is usual")

    @property
    def bucket_mb(self) -> float:
        return 100.0  # its messages are so small that latency and packet headers are what a bucket costs

    @property
    def any_size(self) -> bool:
        return self.factors == "fp32"

    @property
    def sum_rounding(self) -> float:
        return 0.0 if self.factors == "fp32" else torch.finfo(torch.float16).eps / 2

    def fits(self, binding: Binding) -> None:
        """Refuse a rank that no matrix has, and a model without a matrix: all of it would be sent in full."""
        shapes = [matrix_shape(s.shape) for layout in binding.layouts for s in layout.segments]
        most = max((min(n, m) for n, m in shapes), default=0)
        if not most and any(layout.numel for layout in binding.layouts):
            raise AttachError(
                f"{self}: the model has no matrix, and vectors are sent in full; use allreduce(fp32()), or scatter(qsgd())"
            )
        if self.ratio is None and 0 < most < self.rank:
            raise AttachError(
                f"{self}: no matrix of the model has a rank above {most}, so that all would be sent in full; take "
                f"rank={max(most // 2, 1)} or less, or ratio="
            )

    def policy(self, key: str) -> Policy:
        return "equal" if key.startswith("q:") else "mean"

    def sum_bytes(self, layout: Layout, size: int) -> list[int]:
        """Bytes after the first step, which may send more."""
        groups, plain = _groups(self, layout.segments)
        p = sum(g.rank * g.n * len(g.segments) for g in groups)
        q = sum(g.rank * g.m * len(g.segments) for g in groups)
        wide = layout.dtype.itemsize
        rest = sum(end - begin for begin, end in plain) * wide
        lengths = [wide * p + rest, wide * q] if self.factors == "fp32" else [2 * p, rest, 2 * q]
        return [length for length in lengths if length]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        groups, plain = _groups(self, block.layout.segments)
        known = all(f"q:{s.name}" in state for g in groups for s in g.segments)
        if self.start == "svd" and not known:
            return (yield from self._in_full(groups, block, state, context))
        narrow = self.factors == "fp16" and known
        places = _places(plain, block.flat.device)  # of what travels as it is: many vectors, so one operation for all
        starts = [_warm_start(g, state, context, block.flat) for g in groups]
        units = [_last_size(g, state) if narrow else None for g in groups]
        thin = [g.project(block.flat, q) for g, q in zip(groups, starts, strict=True)]
        if narrow:
            thin = [_narrowed(p, context, u, _size(q)) for p, q, u in zip(thin, starts, units, strict=True)]
        rest = [block.flat.index_select(0, places)] if plain else []
        summed, dense = yield from _all_reduce_apart(thin, rest)
        bases = [orthogonal(p.to(block.flat.dtype)) for p in summed]
        drains = block.drains and not narrow
        represented = zip(groups, bases, units, strict=True)
        sent = [_narrowed(g.represent(block.flat, p, drains), context, u) for g, p, u in represented]
        for x in rest if drains else ():
            block.flat.index_add_(0, places, x, alpha=-1.0)
        own = [_widened(q, u, block.flat) for q, u in zip(sent, units, strict=True)]
        means = yield from _all_reduce_together(sent)
        means = [_widened(q, u, block.flat) for q, u in zip(means, units, strict=True)]

        mean = block.for_mean()
        largest = [kernels.divide(total, context.size).max().double() for total in dense]
        for total in dense:
            mean.index_copy_(0, places, total)
        for g, p, q, old in zip(groups, bases, means, starts, strict=True):
            q /= context.size
            g.write(p, q, mean)
            largest.append(2 * g.rank * _remember(g, q, old, state))  # no number in P exceeds one, but for rounding

        def add_sent(into: Tensor, weight: float) -> None:
            for x in rest:
                into.index_add_(0, places, x, alpha=weight)
            for g, p, q in zip(groups, bases, own, strict=True):
                g.add(p, q, into, weight)

        return ReduceResult(mean, add_sent, torch.stack(largest).max() if largest else None, drains)

    def _in_full(
        self, groups: "list[_SameRank]", block: Bucket, state: State, context: Context
    ) -> Program[ReduceResult]:
        """Average the first bucket in full, and start the iteration from its mean."""
        result = yield from FP32().average(block, state, context)
        numbers = torch.nan_to_num(result.mean, 0.0, 0.0, 0.0)  # of a mean that is none, nothing will be kept
        for g in groups:
            starts = _warm_start(g, state, context, block.flat)
            _remember(g, g.leading(numbers, starts), starts, state)
        return result

    def rank_of(self, n: int, m: int) -> int:
        """The rank of a matrix's factors."""
        if self.ratio is None:
            return min(n, m, self.rank)
        return max(int(n * m / (self.ratio * max(n + m, 1))), 1)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of a tensor as a matrix: first dimension by the rest; zeros for a vector."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (0, 0)


def first_directions(context: Context, name: str, rank: int, columns: int) -> Tensor:
    """A random Q^T for a matrix, the same on all ranks."""
    return context.rng.shared_normal(f"{name}/powersgd", rank, columns)


@lru_cache(maxsize=1024)
def _groups(codec: PowerSGD, segments: tuple[Segment, ...]) -> "tuple[list[_SameRank], tuple[tuple[int, int], ...]]":
    """Matrices to compress, grouped by shape, and begin and end of the segments that are sent in full."""
    by_shape = dict[tuple[int, int], list[Segment]]()
    plain = list[tuple[int, int]]()
    for s in segments:
        n, m = matrix_shape(s.shape)
        if n * m > 0 and n * m >= codec.min_ratio * codec.rank_of(n, m) * (n + m):
            by_shape.setdefault((n, m), []).append(s)
        elif s.numel:
            plain.append((s.offset, s.offset + s.numel))
    return [_SameRank(n, m, codec.rank_of(n, m), tuple(ss)) for (n, m), ss in by_shape.items()], tuple(plain)


@lru_cache(maxsize=1024)
def _places(runs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Indices of the elements of these runs; made once, on the host."""
    elements = [torch.arange(a, b) for a, b in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *elements]).to(device)


@dataclass(frozen=True)
class _SameRank:
    """Matrices of one shape, and the rank of their factors."""

    n: int
    m: int
    rank: int
    segments: tuple[Segment, ...]

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of the matrices in the bucket: each pass works in place, since a copy costs as much as the product."""
        begin = flat.storage_offset()
        for s in self.segments:
            # A slice and a view would take twice as long.
            yield flat.as_strided((self.n, self.m), (self.m, 1), begin + s.offset)

    def project(self, flat: Tensor, q: Tensor) -> Tensor:
        """P^T = Q^T M^T: the thin factor stays contiguous along its long side, which is several times faster."""
        thin = q.new_empty(len(self.segments), self.rank, self.n)
        for matrix, start, out in zip(self.views(flat), q, thin, strict=True):
            torch.mm(start, matrix.t(), out=out)
        return thin

    def represent(self, flat: Tensor, p: Tensor, drains: bool = False) -> Tensor:
        """Q^T = P^T M: the matrices in the common basis; with `drains` P Q^T is subtracted from each at once."""
        own = p.new_empty(len(self.segments), self.rank, self.m)
        for matrix, basis, out in zip(self.views(flat), p, own, strict=True):
            torch.mm(basis, matrix, out=out)
            if drains:
                matrix.addmm_(basis.t(), out, alpha=-1.0)
        return own

    def leading(self, flat: Tensor, start: Tensor) -> Tensor:
        """Q^T = the leading right singular vectors times their singular values, by iterating on the matrices themselves.

        They are brought near to one, where they lie.
        """
        shifts = [_shift(matrix) for matrix in self.views(flat)]
        for matrix, shift in zip(self.views(flat), shifts, strict=True):
            _moved(matrix, -shift, matrix)
        q = start
        for _ in range(SWEEPS):
            q = self.represent(flat, orthogonal(self.project(flat, q)))
        _, values, vectors = torch.linalg.svd(q, full_matrices=False)
        found = values.unsqueeze(-1) * vectors
        return torch.stack([_moved(one, shift) for one, shift in zip(found, shifts, strict=True)])

    def write(self, p: Tensor, q: Tensor, flat: Tensor) -> None:
        for view, basis, factor in zip(self.views(flat), p, q, strict=True):
            torch.mm(basis.t(), factor, out=view)

    def add(self, p: Tensor, q: Tensor, flat: Tensor, weight: float) -> None:
        for view, basis, factor in zip(self.views(flat), p, q, strict=True):
            view.addmm_(basis.t(), factor, alpha=weight)


def _warm_start(group: _SameRank, state: State, context: Context, like: Tensor) -> Tensor:
    """Last step's Q^T, near to one; missing rows (first step, higher rank) are random, the same on all ranks."""
    rows = list[Tensor]()
    for s in group.segments:
        q = state.get(f"q:{s.name}")
        if q is None or q.shape[0] < group.rank:
            fresh = first_directions(context, s.name, group.rank, group.m).to(like)
            q = fresh if q is None else torch.cat([_moved(q, -_shift(q)), fresh[q.shape[0] :]])
        rows.append(q[: group.rank])
    starts = torch.stack(rows)
    return _moved(starts, -_shift(starts))  # of all matrices at once


def _shift(x: Tensor) -> Tensor:
    """Exponent of two that scales each matrix near to one; 0 where its product with another matrix is safe anyway."""
    exponent = torch.frexp(x.abs().amax(dim=(-2, -1), keepdim=True)).exponent
    return exponent.masked_fill(exponent.abs() <= NEAR, 0)


def _moved(x: Tensor, powers: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply by a power of two, exactly; in two steps, since one factor may overflow."""
    half = torch.div(powers, 2, rounding_mode="floor")
    return torch.ldexp(torch.ldexp(x, half), powers - half, out=out)


def _remember(group: _SameRank, q: Tensor, old: Tensor, state: State) -> Tensor:
    """Keep Q for the next step; returns its largest magnitude."""
    # A gradient that was zero this step must not erase the direction found before.
    tops = q.abs().amax(dim=(1, 2), keepdim=True)
    before = [_kept_before(state.get(f"q:{s.name}"), start) for s, start in zip(group.segments, old, strict=True)]
    for s, kept in zip(group.segments, torch.where(tops != 0, q, torch.stack(before)), strict=True):
        state[f"q:{s.name}"] = kept
    return tops.max().double()


def _kept_before(q: Tensor | None, start: Tensor) -> Tensor:
    """The stored Q, unscaled, of the rows that this step started from."""
    return start if q is None or q.shape[0] < start.shape[0] else q[: start.shape[0]]


def orthogonal(p: Tensor) -> Tensor:
    """Orthonormal rows. Householder QR: safe for zero and for nearly dependent rows, where Gram-Schmidt is not.

    The rows are brought to unit size first, so that tiny gradients do not fall below what QR takes for zero.
    """
    largest = p.abs().amax(dim=(1, 2), keepdim=True)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    return torch.linalg.qr((p / safe).transpose(1, 2))[0].transpose(1, 2).contiguous()


def _size(q: Tensor) -> Tensor:
    """A power of two about as large as each matrix."""
    tops = q.abs().amax(dim=(1, 2), keepdim=True)
    return torch.ldexp(torch.ones_like(tops), torch.frexp(tops).exponent.clamp(-126, 127))


def _last_size(group: _SameRank, state: State) -> Tensor:
    """The same for each matrix's last Q, which all ranks have: the unit of half precision."""
    return torch.cat([_size(state[f"q:{s.name}"][: group.rank].unsqueeze(0)) for s in group.segments])


def _narrowed(factor: Tensor, context: Context, *units: Tensor | None) -> Tensor:
    """In half precision, clipped so that no sum of all ranks overflows. NaN and inf stay."""
    scaled, most = factor, torch.finfo(torch.float16).max / context.size
    for unit in units:
        if unit is None:
            return factor
        scaled = scaled / unit
    return torch.where(scaled.isfinite(), scaled.clamp(-most, most), scaled).half()


def _widened(factor: Tensor, unit: Tensor | None, like: Tensor) -> Tensor:
    return factor if unit is None else factor.to(like.dtype) * unit.to(like.dtype)


def _all_reduce_apart(thin: list[Tensor], rest: list[Tensor]) -> Program[tuple[list[Tensor], list[Tensor]]]:
    """All-reduce in one message, or in two for numbers of two dtypes."""
    if {t.dtype for t in thin} == {t.dtype for t in rest} or not thin or not rest:
        summed = yield from _all_reduce_together([*thin, *rest])
        return summed[: len(thin)], summed[len(thin) :]
    first = yield from _all_reduce_together(thin)
    return first, (yield from _all_reduce_together(rest))


def _all_reduce_together(tensors: list[Tensor]) -> Program[list[Tensor]]:
    """All-reduce many tensors in one message."""
    if not tensors:
        return []
    flat = torch.cat([t.reshape(-1) for t in tensors])
    total = yield from all_reduce(flat)
    pieces = total.split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True)]
