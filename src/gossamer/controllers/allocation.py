"""Allocation of bits: the least rounding noise within a budget of bits, or the fewest bits within a limit of noise.

Of d numbers rounded against a norm whose squares sum to V over them, s levels on each side of zero leave a variance of at
most V / (4 s^2), and take d (1 + log2(1 + s)) bits. With the weight w of that noise in the end (a late step's counts more),

    minimise sum w V / (4 s^2)  subject to  sum d log2(1 + s) <= budget.

Both are convex in the bits, so an allocation is best where one more bit buys as much everywhere: s^3 / (1 + s) = c w V / d,
but for those at an end of what is allowed. For large s that is s ~ sqrt(w V / d), which the paper has; for few bits it is not.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

_POINTS = 4096  # of the table that is read between its entries: off by less than 1e-6 bits
_HALVINGS = 32


class Demand(NamedTuple):
    """Groups of numbers: the size of each, and its weighted noise with one level."""

    sizes: Numbers
    noises: Numbers

    def noise(self, bits: Numbers) -> float:
        """Total noise with these bits per number, signs included."""
        return float((self.noises / levels(bits) ** 2).sum())

    def cost(self, bits: Numbers) -> float:
        return float((self.sizes * bits).sum())


def levels(bits: Numbers) -> Numbers:
    """Number of levels on each side of zero, for bits that include the sign.

    >>> levels(np.array([2.0, 4.0, 8.0]))
    array([  1.,   7., 127.])
    """
    return 2.0 ** (bits - 1.0) - 1.0


def within_budget(demand: Demand, budget: float, least: float, most: float) -> Numbers:
    """The bits of each group that minimise the noise within a total budget.

    >>> within_budget(Demand(np.ones(2), np.array([1.0, 64.0])), 10.0, 2.0, 8.0).round(2)
    array([3.66, 6.34])
    """
    return _search(demand, lambda bits: demand.cost(bits) > budget, least, most)


def of_widths(demand: Demand, budget: float, widths: Sequence[float]) -> Numbers:
    """As `within_budget`, with these widths only: each further bit goes where it removes most noise.

    >>> of_widths(Demand(np.ones(3), np.array([1.0, 2.0, 64.0])), 10.0, (2.0, 3.0, 4.0, 5.0))
    array([2., 3., 5.])
    """
    bits = np.array(sorted(widths))
    gains = -np.diff(levels(bits) ** -2.0) / np.diff(bits)  # they fall from width to width
    worth = np.outer(demand.noises / demand.sizes, gains)
    low, high = 0.0, float(worth.max(initial=0.0)) * 2 + 1e-300

    def at(price: float) -> Numbers:
        return bits[(worth > price).sum(1)]

    if demand.cost(at(low)) <= budget:
        return at(low)
    for _ in range(2 * _HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if demand.cost(at(middle)) <= budget else (middle, high)
    return at(high)


def within_noise(demand: Demand, noise: float, least: float, most: float) -> Numbers:
    """The fewest bits of each group whose total noise stays within a limit."""
    return _search(demand, lambda bits: demand.noise(bits) <= noise, least, most)


def _search(demand: Demand, enough: Callable[[Numbers], bool], least: float, most: float) -> Numbers:
    """Bisect the inverse price c, with which bits grow, to where `enough` becomes true."""
    prices, bits = _table(least, most)
    felt = demand.noises > 0
    urgent = np.log(np.where(felt, demand.noises, 1.0) / demand.sizes)

    def at(log_c: float) -> Numbers:
        return np.where(felt, np.interp(log_c + urgent, prices, bits), least)

    if not felt.any():
        return at(0.0)
    low, high = prices[0] - urgent[felt].max(), prices[-1] - urgent[felt].min()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(at(middle)) else (middle, high)
    return at(high)


@lru_cache(maxsize=64)
def _table(least: float, most: float) -> tuple[Numbers, Numbers]:
    """Table of log(s^3 / (1 + s)) and bits, from `least` to `most`; `interp` clamps outside of it."""
    bits = np.linspace(least, most, _POINTS)
    s = levels(bits)
    return 3 * np.log(s) - np.log1p(s), bits
