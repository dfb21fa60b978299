"""Noisy quadratics whose gradients are rounded with so many bits at each step: what is left in the end, and what theory bounds.

x = x - lr Q(c x + noise) in `WIDE` dimensions; Q rounds to s = 2^(bits - 1) - 1 levels of the largest element, unbiased.
"""

import numpy as np
import numpy.typing as npt

from gossamer.bench.claims.evidence import Rows
from gossamer.controllers.allocation import Demand, levels, of_widths, within_budget

WIDE, RUNS, LEAST, MOST = 64, 200, 2.0, 8.0
RATE, NOISE = 0.1, 0.02  # the learning rate, and the deviation of a gradient's element
_WIDTHS = [float(np.log2(s + 1)) + 1 for s in range(1, 128)]  # bits of so many levels on each side of zero
Numbers = npt.NDArray[np.float64]


def allocation(seed: int, steps: int) -> Rows:
    """How far the bits that are chosen lie above the least noise, by duality, for random demands."""
    rng, over = np.random.default_rng(seed), list[float]()
    for _ in range(20):
        demand = Demand(rng.integers(100, 5000, steps).astype(float), rng.lognormal(0.0, 2.0, steps))
        bits = within_budget(demand, 4.0 * demand.sizes.sum(), LEAST, MOST)
        noise = demand.noise(bits)
        over.append((noise - _bound(demand, 4.0 * float(demand.sizes.sum()))) / noise)
    return {"above": [float(o) for o in over]}


def _bound(demand: Demand, budget: float) -> float:
    """The largest lower bound that a price of bits gives, by duality; bits on a grid of a thousandth."""
    grid = np.linspace(LEAST, MOST, 6001)
    falls = 1 / levels(grid) ** 2
    low, high = np.log(demand.noises / demand.sizes).min() - 12, np.log(demand.noises / demand.sizes).max() + 2

    def at(log_price: float) -> float:
        price = np.exp(log_price)
        each = [(v * falls + price * n * grid).min() for v, n in zip(demand.noises, demand.sizes, strict=True)]
        return float(np.sum(each)) - price * budget

    for _ in range(60):  # it is concave in the price, and has one top in its logarithm
        third = (high - low) / 3
        low, high = (low + third, high) if at(low + third) < at(high - third) else (low, high - third)
    return at((low + high) / 2)


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
    """A whole number of levels at each step; the same number of bits in all kinds, or a little less where they change."""
    if kind == "fixed":
        return np.full(steps, mean_bits)
    worn = (1 - lr * curves[:, None]) ** (2 * np.arange(steps))
    size = (curves[:, None] ** 2 * worn).max(0) + 9 * NOISE**2  # of the largest element, squared, by expectation
    last = (curves[:, None] * worn).mean(0)[::-1]  # what is left of a step's noise in the end
    demand = Demand(np.ones(steps), size * last)
    found = of_widths(demand, mean_bits * steps, _WIDTHS)
    return found if kind == "dynamic" else found[::-1].copy()
