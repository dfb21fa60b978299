"""Severity: how slow a network is for a model, as one number, and how much sending bears it.

S = (seconds to send the model once, in float32, over one host's link) / (seconds of a step's computing). A recipe that sends x models a
step keeps machines busy for 1 / (1 + S x) of the time if nothing is hidden behind computing, and for min(1, 1 / (S x)) if everything
is. Links send as fast both ways at once; latency and coding are left out.
"""

from math import inf
from typing import NamedTuple

BUSY = 0.95


def severity(parameters: int, rate: float, computing: float) -> float:
    """S of a model on links of `rate` bytes a second, 0 where they have no limit.

    >>> round(severity(5_797_888, 25e6, 0.12), 2)
    7.73
    """
    return 0.0 if rate == inf else 4 * parameters / rate / computing


def busy(severity: float, models: float, overlap: bool) -> float:
    """The share of the time that is computing, where a step sends so many models.

    >>> busy(10, 0.1, overlap=False), busy(10, 0.1, overlap=True)
    (0.5, 1.0)
    """
    waiting = severity * models
    return 1 / max(waiting, 1) if overlap else 1 / (1 + waiting)


class Bearable(NamedTuple):
    """The severity up to which machines are busy for 95 % of the time: with nothing hidden behind computing, and with everything."""

    plain: float
    overlapped: float

    @staticmethod
    def of(models: float) -> "Bearable | None":
        """None for a recipe that sends nothing.

        >>> [round(most, 3) for most in Bearable.of(1.5) or ()]
        [0.035, 0.702]
        """
        return Bearable((1 / BUSY - 1) / models, 1 / BUSY / models) if models else None

    def __str__(self) -> str:
        """
        >>> str(Bearable.of(0.05))
        '95 % busy up to S = 1.1, with full overlap 21'
        """
        return (
            f"{BUSY:.0%}".replace("%", " %")
            + f" busy up to S = {two_digits(self.plain)}, with full overlap {two_digits(self.overlapped)}"
        )


def two_digits(number: float) -> str:
    """With two digits, never in powers of ten."""
    return f"{float(f'{number:.2g}'):g}" if number < 1e6 else f"{number:,.0f}"
