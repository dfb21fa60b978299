"""Selection by magnitude."""

from __future__ import annotations

import torch
from torch import Tensor

_NAN = 0x7F800001  # one key for every NaN, above infinity


def magnitudes(x: Tensor) -> Tensor:
    """|x| as integers in the same order, NaN on top."""
    return (x.view(torch.int32) & 0x7FFFFFFF).clamp_(max=_NAN)


def compact(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    chosen = (x.abs() < threshold).logical_not_().nonzero().view(-1)
    return chosen.int(), x[chosen]


def topk(x: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    keys = magnitudes(x)
    bar = keys.topk(k, sorted=False).values.min()
    above = (keys > bar).nonzero().view(-1)
    level = (keys == bar).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, level]).sort().values.int()


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, weight: float) -> bool:
    if bool(((indices < 0) | (indices >= out.numel())).any()):
        return False
    out.index_add_(0, indices, values * weight)
    return True
