"""Selection by magnitude."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.kernels.layout import Bounds

_NAN = 0x7F800001  # one key for every NaN, above infinity


def magnitudes(x: Tensor) -> Tensor:
    """|x| as integers in the same order; NaN is the largest."""
    return (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_NAN)


def topk(x: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    # No two keys are equal: behind the magnitude stands the place, counted from the end. So nobody must ask how many tie.
    keys = magnitudes(x).long().mul_(1 << 31)
    keys.add_(torch.arange(x.numel() - 1, -1, -1, dtype=torch.int32, device=x.device))
    return keys.topk(k, sorted=False).indices.sort().values.int()


def topk_each(x: Tensor, bounds: Bounds, counts: tuple[int, ...], out: Tensor) -> None:
    done = 0
    for k, (a, b) in zip(counts, pairwise(bounds), strict=True):
        torch.add(topk(x[a:b], k), a, out=out[done : done + k])
        done += k


def sparse_mean(out: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Return None: there is no faster way here than adding one vector after the other."""


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, weight: float) -> bool:
    n = out.numel()
    if out.device.type != "cpu":
        indices, values = spoil_outside(indices, values, n)
    elif bool(((indices < 0) | (indices >= n)).any()):
        return False
    out.index_add_(0, indices, values * weight)
    return True


def spoil_outside(indices: Tensor, values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """An index outside [0, n) becomes 0, and its value NaN."""
    outside = (indices < 0) | (indices >= n)
    return indices.masked_fill(outside, 0), values.masked_fill(outside, torch.nan)
