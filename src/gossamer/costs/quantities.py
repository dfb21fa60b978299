"""Reads and writes quantities with units: rates, times, sizes and prices."""

import re
from math import inf, isfinite
from typing import NamedTuple

from gossamer.core.errors import CostError

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(.*?)\s*", re.ASCII | re.IGNORECASE)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0, "min": 1 / 60, "h": 1 / 3600, "d": 1 / 86400}


class Price(NamedTuple):
    """An amount of money for one unit: an hour, or a gigabyte."""

    amount: float
    currency: str


def rate(text: str) -> float:
    """Bytes per second, from bits or bytes.

    >>> rate("200mbit"), rate("25 Gbit/s"), rate("300 GB/s"), rate("unshaped")
    (25000000.0, 3125000000.0, 300000000000.0, inf)
    """
    if text.strip().lower() in ("unshaped", "inf"):
        return inf
    value, unit = _split(text, "a rate", "200mbit, 25 Gbit/s or 300 GB/s")
    found = re.fullmatch(r"([kmgt]?)(bit|b)(?:/s|ps)?", unit, re.IGNORECASE)
    if found is None:
        raise CostError(f"{text!r} is not a rate: write it as 200mbit, 25 Gbit/s or 300 GB/s")
    bits = found[2] != "B"
    if found[2] == "b" and not unit.endswith("ps"):
        raise CostError(f"{text!r} may mean bits or bytes: write {value:g} {found[1]}bit/s or {value:g} {found[1]}B/s")
    return _positive(text, value) * _PREFIXES[found[1].lower()] / (8 if bits else 1)


def seconds(text: str) -> float:
    """Seconds.

    >>> seconds("30us"), seconds("350 ms"), seconds("90 d")
    (3e-05, 0.35, 7776000.0)
    """
    value, unit = _split(text, "a time", "30us, 350ms, 2s or 90 d")
    if unit.lower() not in _PER_SECOND:
        raise CostError(f"{text!r} is not a time: write it as 30us, 350ms, 2s or 90 d")
    if value < 0:
        raise CostError(f"{text!r} is negative")
    return value / _PER_SECOND[unit.lower()]


def size(text: str) -> float:
    """Bytes.

    >>> size("24 GB"), size("512MB")
    (24000000000.0, 512000000.0)
    """
    value, unit = _split(text, "a size", "24 GB")
    found = re.fullmatch(r"([kmgt]?)b", unit, re.IGNORECASE)
    if found is None:
        raise CostError(f"{text!r} is not a size: write it as 24 GB")
    return _positive(text, value) * _PREFIXES[found[1].lower()]


def price(text: str, per: str) -> Price:
    """An amount of money for one `per`.

    >>> price("2.10 USD/h", "h")
    Price(amount=2.1, currency='USD')
    """
    value, unit = _split(text, "a price", f"2.10 USD/{per}")
    found = re.fullmatch(r"([A-Za-z€$£]{1,4})\s*/\s*(\w+)", unit)
    if found is None or found[2].lower() != per.lower() or value < 0:
        raise CostError(f"{text!r} is not a price: write it as 2.10 USD/{per}")
    return Price(value, found[1])


def hourly(text: str) -> Price:
    """An amount of money for an hour; a currency may be named.

    >>> hourly("2.10/hour"), hourly("2.10 EUR/h")
    (Price(amount=2.1, currency=''), Price(amount=2.1, currency='EUR'))
    """
    example = "2.10/hour or 2.10 USD/hour"
    value, unit = _split(text, "a price", example)
    found = re.fullmatch(r"([A-Za-z€$£]{0,4})\s*/\s*(?:h|hour)", unit, re.IGNORECASE)
    if found is None or value < 0:
        raise CostError(f"{text!r} is not a price: write it as {example}")
    return Price(value, found[1])


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None or not isfinite(float(found[1])):
        raise CostError(f"{text!r} is not {what}: write it as {example}")
    return float(found[1]), found[2]


def _positive(text: str, value: float) -> float:
    if value <= 0:
        raise CostError(f"{text!r} must be more than 0")
    return value


def say_rate(bytes_per_second: float) -> str:
    """Write a rate in bits with three digits.

    >>> say_rate(25e6), say_rate(3.125e9), say_rate(inf)
    ('200 Mbit/s', '25 Gbit/s', 'no limit')
    >>> say_rate(187_600_000 / 8), say_rate(11_260_000_000 / 8)
    ('188 Mbit/s', '11.3 Gbit/s')
    """
    if bytes_per_second == inf:
        return "no limit"
    return _in_units(8 * bytes_per_second, ("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))


def say_seconds(value: float) -> str:
    """Write a time with three digits.

    >>> say_seconds(0.0351), say_seconds(2.5), say_seconds(3e-5), say_seconds(62_208.3)
    ('35.1 ms', '2.5 s', '30 us', '62208 s')
    """
    return _in_units(value, ("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def say_size(value: float) -> str:
    """Write a size with three digits.

    >>> say_size(4.4e6), say_size(999)
    ('4.4 MB', '999 B')
    """
    return _in_units(value, ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def say_parameters(count: int) -> str:
    return _in_units(count, ("M parameters", 1e6), ("k parameters", 1e3), ("parameters", 1.0))


def say_money(amount: float, currency: str) -> str:
    return _in_units(amount, (currency, 1.0))


def _in_units(value: float, *units: tuple[str, float]) -> str:
    """A value in the largest unit that is not above it, or in the last; never in powers of ten."""
    unit, factor = next(((unit, factor) for unit, factor in units if value >= 0.9995 * factor), units[-1])
    return f"{value / factor:{'.3g' if value < 999.5 * factor else '.0f'}} {unit}"
