"""Water-filling: the probabilities of keeping atoms that minimise the variance, and samples with these probabilities."""

from math import ceil

import torch
from torch import Tensor

from gossamer import kernels

_CERTAIN = 1e300  # times any weight that is not zero it is more than one, and times zero it is zero


def probabilities(weights: Tensor, budget: float) -> Tensor:
    """For every row of weights w the p in [0, 1], sum p <= budget, that minimise sum w^2 / p; in double precision.

    p = min(1, theta w). The m largest atoms are certain, and the others share what is left of the budget by their weights:
    m is the first place, in descending order, at which w (budget - m) <= the sum of what is not yet certain. An atom can
    only be certain while more than one unit is left, so no more than the `budget` largest need be in order.

    >>> weights = torch.tensor([[10.0, 3.0, 2.0, 1.0, 1.0, 1.0]])
    >>> p = probabilities(weights, budget=3)
    >>> p.tolist(), float((weights.square() / p).sum())
    ([[1.0, 0.75, 0.5, 0.25, 0.25, 0.25]], 132.0)
    """
    n = weights.shape[-1]
    if budget >= n:
        return (weights > 0).double()
    top, small = _largest(weights.float(), ceil(budget))
    tails = small + top.flip(-1).cumsum(-1).flip(-1)  # added from the smallest on: a difference would lose them
    left = budget - torch.arange(top.shape[-1], dtype=torch.float64, device=top.device)
    certain = (top * left > tails).cumprod(-1).sum(-1, keepdim=True)
    theta = left.expand_as(tails).gather(-1, certain) / tails.gather(-1, certain)
    return (weights.double() * theta.clamp_(max=_CERTAIN)).clamp_(max=1.0)


def _largest(weights: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest of each row in descending order, and the sum of the others, both in double precision."""
    rows, n = weights.shape
    flat, bounds = weights.reshape(-1), tuple(range(0, rows * n + 1, n))
    where = kernels.topk_each(flat, bounds, (count,) * rows).long()
    top = flat[where].view(rows, count).sort(descending=True)[0]
    small = flat.index_fill(0, where, 0.0).view(rows, n).sum(1, keepdim=True, dtype=torch.float64)
    return top.double(), small


def systematic(p: Tensor, count: int, rng: Tensor) -> tuple[Tensor, Tensor]:
    """Systematic sampling: `count` different indices of each row, index i with probability p_i, and a mask of valid ones.

    The row is laid out as a line on which index i has the length p_i, and is read off at u, u + 1, u + 2, ..., with one
    u ~ U[0, 1) per row (`rng`). As no length exceeds one, no index is read twice. Some are not valid where the line is shorter
    than `count`.
    """
    line = p.cumsum(-1)
    marks = rng[:, None] + torch.arange(count, device=p.device)
    places = torch.searchsorted(line, marks, right=True).clamp_(max=p.shape[-1] - 1)
    return places, marks < line[:, -1:]


def independent(p: Tensor, rng: Tensor) -> list[Tensor]:
    """Independent sampling: the kept indices of each row, each by its own U[0, 1) number; there may be none.

    Only the device knows their number: on a GPU the host waits for it.
    """
    return [row.nonzero().view(-1) for row in rng < p]
