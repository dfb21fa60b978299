"""ATOMO's probabilities on real gradients: is their variance the least, and are draws right on average?"""

import math

import torch
from torch import Tensor

from gossamer.bench import noise
from gossamer.bench.claims.evidence import Rows
from gossamer.bench.workloads import get
from gossamer.codecs.waterfill import probabilities, systematic

DRAWS = 500


def measure(seed: int, workload: str, steps: int, share: float, spectral: bool) -> Rows:
    """The largest matrix of a real gradient: entries, or singular values, at a share of them as the budget."""
    bucket = noise.gradients(get(workload, seed=seed), 1, steps, seed)[0]
    matrix = max(
        (bucket.flat[s.offset : s.offset + s.numel].view(s.shape) for s in bucket.layout.segments if len(s.shape) == 2),
        key=Tensor.numel,
    )
    weights = torch.linalg.svdvals(matrix) if spectral else matrix.abs().reshape(-1)
    weights = weights[weights > 0].float().view(1, -1)
    budget = max(1.0, share * weights.numel())
    p, w = probabilities(weights, budget)[0], weights[0].double()
    least = float((w.square() / p).sum())
    others = [_spend(weight, budget) for weight in (torch.ones_like(w), w.square(), w.sqrt())]
    variances = [float((w.square() / q.clamp(min=1e-300)).sum()) for q in others]
    signs = w.abs().max(), w.norm()
    special = [float((probabilities(weights, float(w.sum() / n))[0] - w / n).abs().max()) for n in signs]
    return {
        "gap": [(least - _dual(w, budget, p)) / least],
        "spent": [float(p.sum()) / budget],
        "ratio": [least / v for v in variances],
        "special": special,
        "z": [_score(p, seed)],
    }


def _dual(w: Tensor, budget: float, p: Tensor) -> float:
    """A lower bound on the least sum w^2 / p, by duality: if it is reached, p is optimal."""
    open_ = p < 1
    price = float((w[open_] / p[open_]).square().mean()) if bool(open_.any()) else 0.0
    q = (w / math.sqrt(price)).clamp(max=1) if price else torch.ones_like(w)
    return float((w.square() / q + price * q).sum()) - price * budget


def _spend(weight: Tensor, budget: float) -> Tensor:
    """Probabilities in proportion to a weight, at most one, that spend the budget."""
    low, high = 0.0, budget / float(weight[weight > 0].min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle * weight).clamp(max=1).sum()) < budget else (low, middle)
    return (low * weight).clamp(max=1)


def _score(p: Tensor, seed: int) -> float:
    """By how many standard errors the atoms together were kept too often or too rarely, the worst of 16 groups."""
    count, rng = math.ceil(float(p.sum())), torch.Generator().manual_seed(seed)
    kept = torch.zeros_like(p)
    for u in torch.rand(DRAWS, generator=rng, dtype=torch.float64):
        places, there = systematic(p.view(1, -1), count, u.view(1))
        kept.index_add_(0, places[0][there[0]], torch.ones(int(there.sum()), dtype=p.dtype))
    one = (p > 1e-3) & (p < 1 - 1e-9)
    if not bool(one.any()):
        return 0.0
    scores = (kept - DRAWS * p)[one] / (DRAWS * p * (1 - p))[one].sqrt()
    return float(scores.abs().max() / math.sqrt(2 * math.log(max(2, int(one.sum())))))
