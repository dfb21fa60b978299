"""Noisy quadratics whose gradients are rounded with so many bits at each step: what is left in the end, and what theory bounds.

x = x - lr Q(c x + noise) in `WIDE` dimensions; Q rounds to s = 2^(bits - 1) - 1 levels of the largest element, unbiased.
"""

import numpy as np
import numpy.typing as npt

from gossamer.bench.claims.evidence import Rows
from gossamer.controllers.allocation import Demand, levels, within_budget

WIDE, RUNS, LEAST, MOST = 64, 200, 2.0, 8.0
RATE, NOISE = 0.05, 0.02  # the learning rate, and the deviation of a gradient's element
Numbers = npt.NDArray[np.float64]


def allocation(seed: int, steps: int) -> Rows:
    """How far the bits that are chosen lie above the least noise, by duality, for random demands."""
    rng, over = np.random.default_rng(seed), list[float]()
    for _ in range(20):
        demand = Demand(rng.integers(100, 5000, steps).astype(float), rng.lognormal(0.0, 2.0, steps))
        bits = within_budget(demand, 4.0 * demand.sizes.sum(), LEAST, MOST)
        noise = demand.noise(bits)
        over.append((noise - _bound(demand, 4.0 * float(demand.sizes.sum()))) / noise)
    return {"above": over}


def _bound(demand: Demand, budget: float) -> float:
    """The largest lower bound that a price of bits gives: a grid of bits for every group, and the best price of many."""
    grid = np.linspace(LEAST, MOST, 6001)
    falls = 1 / levels(grid) ** 2
    best = -np.inf
    low, high = np.log(demand.noises / demand.sizes).min() - 12, np.log(demand.noises / demand.sizes).max() + 2
    for price in np.exp(np.linspace(low, high, 120)):
        each = np.array(
            [(v * falls + price * n * grid).min() for v, n in zip(demand.noises, demand.sizes, strict=True)]
        )
        best = max(best, float(each.sum()) - price * budget)
    return best


def trained(seed: int, bits: str, mean_bits: float, spread: float, steps: int) -> Rows:
    """The mean error of many runs, beside the bound that the variance d G^2 / (4 s^2) gives."""
    curves = np.exp(np.linspace(-spread, spread, WIDE))
    lr = RATE / curves.max()
    chosen = _bits(bits, mean_bits, curves, lr, steps)
    rng = np.random.default_rng(seed)
    x = np.ones((RUNS, WIDE))
    bound = np.ones(WIDE)  # of each coordinate's mean square
    for wide in chosen:
        gradient = curves * x + NOISE * rng.standard_normal(x.shape)
        top, s = np.abs(gradient).max(1, keepdims=True), levels(np.array([wide]))[0]
        rounded = np.floor(gradient / top * s + rng.random(x.shape)) * top / s
        x = x - lr * rounded
        bound = bound * (1 - lr * curves) ** 2 + lr**2 * (NOISE**2 + float((top**2).mean()) / (4 * s**2))
    return {
        "bits": [float(b) for b in chosen],
        "error": [float((curves * x**2).sum(1).mean() / 2)],
        "bound": [float((curves * bound).sum() / 2)],
        "sent": [float(chosen.sum())],
    }


def _bits(kind: str, mean_bits: float, curves: Numbers, lr: float, steps: int) -> Numbers:
    """A whole number of levels at each step; the same number of bits in all kinds, or a little less."""
    if kind == "fixed":
        return _whole(np.full(steps, mean_bits))
    worn = (1 - lr * curves[:, None]) ** (2 * np.arange(steps))
    size = (curves[:, None] ** 2 * worn).max(0) + 9 * NOISE**2  # of the largest element, squared, by expectation
    last = (curves[:, None] * worn).mean(0)[::-1]  # what is left of a step's noise in the end
    demand = Demand(np.ones(steps), size * last)
    found = _whole(within_budget(demand, mean_bits * steps, LEAST, MOST))
    return found if kind == "dynamic" else found[::-1].copy()


def _whole(bits: Numbers) -> Numbers:
    return np.log2(np.floor(levels(bits) + 1e-9) + 1) + 1
