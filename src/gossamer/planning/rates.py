"""Searches rates: those between which a recipe pays, and those that keep machines busy."""

from collections.abc import Callable
from itertools import pairwise
from math import exp, inf, log
from typing import NamedTuple

TIE = 0.05  # differences below this are ties
RATES = [125e3 * 10 ** (6 * i / 24) for i in range(25)]  # 1 Mbit/s to 1 Tbit/s, bytes per second
BUSY = (0.5, 0.8, 0.9, 0.95, 0.99)  # utilisations whose rate is reported


class Interval(NamedTuple):
    """Rates, in bytes per second, between which a recipe is faster."""

    low: float
    high: float


def pays_between(ratio: Callable[[float], float]) -> list[Interval]:
    """The intervals of rates in which a recipe's step is shorter than a baseline's by more than a tie; ends are exact to 2 %."""

    def gains(rate: float) -> bool:
        return ratio(rate) < 1 - TIE

    signs = [gains(rate) for rate in RATES]
    edges = [RATES[0]] if signs[0] else []
    edges += [
        _bisect(gains, *rates) for rates, (before, after) in zip(pairwise(RATES), pairwise(signs)) if before != after
    ]
    edges += [inf] if signs[-1] else []
    return [Interval(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True)]


def _bisect(holds: Callable[[float], bool], a: float, b: float) -> float:
    """The rate between two others at which a condition changes."""
    first = holds(a)
    while b / a > 1.02:
        middle = exp((log(a) + log(b)) / 2)
        a, b = (middle, b) if holds(middle) == first else (a, middle)
    return exp((log(a) + log(b)) / 2)


def busy_at(utilisation: Callable[[float], float]) -> dict[float, float]:
    """The lowest rate at which machines are busy for each share of the time; none if no rate is enough."""
    out, shares = dict[float, float](), [utilisation(rate) for rate in RATES]
    for wanted in BUSY:
        place = next((i for i, share in enumerate(shares) if share >= wanted), None)
        if place == 0:
            out[wanted] = RATES[0]
        elif place is not None:
            ends = RATES[place - 1], RATES[place]
            out[wanted] = _bisect(lambda rate, wanted=wanted: utilisation(rate) >= wanted, *ends)
    return out
