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
    out, began = list[Interval](), RATES[0] if signs[0] else None
    for (a, b), (before, after) in zip(pairwise(RATES), pairwise(signs)):
        if before == after:
            continue
        edge = _bisect(gains, a, b)
        if after:
            began = edge
        elif began is not None:
            out.append(Interval(began, edge))
            began = None
    return out if began is None else [*out, Interval(began, inf)]


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

        def reached(rate: float, wanted: float = wanted) -> bool:
            return utilisation(rate) >= wanted

        place = next((i for i, share in enumerate(shares) if share >= wanted), None)
        if place is None:
            continue
        if place == 0:
            out[wanted] = RATES[0]
            continue
        out[wanted] = _bisect(reached, RATES[place - 1], RATES[place])
    return out
