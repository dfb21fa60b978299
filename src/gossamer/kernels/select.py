"""Selects elements by magnitude, and adds selected elements to a vector."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import Bounds, CorruptWire, require_bounds, require_count, require_vector
from gossamer.kernels.reference.select import spoil_outside
from gossamer.kernels.scales import divide


def topk(x: Tensor, k: int) -> Tensor:
    """Indices (int32, ascending) of exactly the k largest |x|; the lowest index wins a tie, NaN is the largest.

    Large inputs: a sampled lower bound, one compaction, an exact selection among the survivors; about one read of
    the input. On a GPU this is a handful of torch operations.
    """
    return topk_each(x, (0, x.numel()), (k,))


def topk_each(x: Tensor, bounds: Bounds, counts: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """`topk` of every segment in one call: the indices in x (int32, ascending) of each segment's largest |x|.

    They are written to `out`, if there is one.
    """
    require_vector("x", x)
    if len(counts) != require_bounds(bounds, x.numel()):
        raise ValueError(f"{len(counts)} counts given for {len(bounds) - 1} segments")
    for k, (a, b) in zip(counts, pairwise(bounds), strict=True):
        if not 0 <= k <= b - a:
            raise ValueError(f"k must be between 0 and {b - a}, got {k}")
    if out is None:
        out = torch.empty(sum(counts), dtype=torch.int32, device=x.device)
    require_vector("out", out, torch.int32)
    require_count("out", out, sum(counts))
    twin("select", "topk_each", x.device)(x, bounds, counts, out)
    return out


def sparse_mean(indices: Sequence[Tensor], values: Sequence[Tensor], out: Tensor) -> Tensor:
    """out = the mean of sparse vectors (indices and values), added in their order; returns max |out|.

    An index outside is answered as by `scatter_add`. On a CPU, where indices ascend, out is written once and not read.
    """
    require_vector("out", out)
    for i, v in zip(indices, values, strict=True):
        require_vector("indices", i, torch.int32)
        require_vector("values", v)
        require_count("values", v, i.numel())
    largest: Tensor | None = twin("select", "sparse_mean", out.device)(out, indices, values)
    if largest is not None:
        return largest
    out.zero_()
    for i, v in zip(indices, values, strict=True):
        scatter_add(out, i, v)
    return divide(out, len(indices))


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """out[indices] += weight * values, in place; an index outside raises before anything is written.

    On a GPU the host does not wait to be told: an index outside makes out[0] NaN, and the step is skipped for it.
    Reads 12 and writes 4 bytes per index. Repeated indices add up, in order on a CPU.
    """
    require_vector("out", out)
    require_vector("indices", indices, torch.int32)
    require_vector("values", values)
    require_count("values", values, indices.numel())
    fits = out.numel() > 0 or indices.numel() == 0
    if not (fits and twin("select", "scatter_add", out.device)(out, indices, values, weight)):
        raise CorruptWire(f"scatter_add: an index lies outside [0, {out.numel()})")


def within(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Check that all indices lie in [0, n), and return both arguments; an index outside is handled as in `scatter_add`."""
    if indices.device.type != "cpu":
        return spoil_outside(indices, values, n)
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < n:
        raise CorruptWire(f"an index lies outside [0, {n})")
    return indices, values
