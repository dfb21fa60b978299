"""Search ranges: the values of a part's argument that are worth trying.

They are declared in the argument's annotation, where a search finds them:

    ratio: Annotated[float, LogRange(0.001, 0.1)] = 0.01
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, final, get_args, get_origin, get_type_hints

DIGITS = 3  # significant digits of a value between the ends, so that recipes stay readable


class Values(ABC):
    """The values to try for one argument.

    Law: each of them makes a legal part of the part's sample, and is written and read back as it is.
    """

    @abstractmethod
    def at(self, place: float) -> Any:
        """The value at a place in [0, 1]."""

    @property
    @abstractmethod
    def ends(self) -> tuple[Any, ...]:
        """The lowest and the highest value; all values where they have no order."""


@dataclass(frozen=True)
class Span(Values):
    """Numbers between two ends, both included; integers if the ends are."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"a range needs two numbers, the lower one first, not {self.low} and {self.high}")
        if type(self.low) is not type(self.high):
            raise ValueError(f"both ends of a range must be integers or both floats, not {self.low} and {self.high}")

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int)

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def at(self, place: float) -> float:
        if self.whole:  # all integers have equal room on the scale
            return max(self.low, min(self.high, math.floor(self._between(self.low, self.high + 1, place))))
        return max(self.low, min(self.high, float(f"{self._between(self.low, self.high, place):.{DIGITS}g}")))

    @abstractmethod
    def _between(self, low: float, high: float, place: float) -> float: ...


@final
class Range(Span):
    """Numbers on a linear scale.

    >>> Range(0.3, 0.9).at(0.5), Range(2, 8).at(0.99), str(Range(2, 8))
    (0.6, 8, '2 to 8')
    """

    def _between(self, low: float, high: float, place: float) -> float:
        return low + place * (high - low)

    def __str__(self) -> str:
        return f"{self.low} to {self.high}"


@final
class LogRange(Span):
    """Positive numbers on a logarithmic scale.

    >>> LogRange(0.001, 0.1).at(0.5), LogRange(1, 64).at(0.5), str(LogRange(0.001, 0.1))
    (0.01, 8, '0.001 to 0.1, by factors')
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ValueError(f"LogRange needs positive numbers, not {self.low}; use Range")

    def _between(self, low: float, high: float, place: float) -> float:
        return low * (high / low) ** place

    def __str__(self) -> str:
        return f"{self.low} to {self.high}, by factors"


@final
@dataclass(frozen=True, init=False)
class Choice(Values):
    """One of a few values.

    >>> Choice("max", "l2").at(0.7), str(Choice(1, 2, 4))
    ('l2', '1, 2 or 4')
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        if not values or len(set(values)) < len(values):
            raise ValueError(f"the values of a Choice must differ, got {values}")
        object.__setattr__(self, "values", values)

    def at(self, place: float) -> Any:
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    @property
    def ends(self) -> tuple[Any, ...]:
        return self.values

    def __str__(self) -> str:
        *others, last = map(str, self.values)
        return f"{', '.join(others)} or {last}" if others else last


@cache
def ranges_of(part: type) -> dict[str, Values]:
    """The search range of each argument of a part that declares one.

    >>> from gossamer.codecs import TopK
    >>> str(ranges_of(TopK)["ratio"])
    '0.001 to 0.1, by factors'
    """
    hints = get_type_hints(part, include_extras=True)
    found = {f.name: _values(hints[f.name]) for f in fields(part)}
    return {name: values for name, values in found.items() if values is not None}


def _values(hint: Any) -> Values | None:
    said = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((s for s in said if isinstance(s, Values)), None)
