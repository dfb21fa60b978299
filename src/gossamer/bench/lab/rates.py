"""Parse rates and delays: `200mbit`, `100mbit/20mbit`, `unshaped`, `10ms`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import LabInputError

UNSHAPED = "unshaped"
_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
_NUMBER = r"(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})"
_STRICT_RATE = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(kbit|mbit|gbit)", re.ASCII)
_LOOSE_RATE = re.compile(_NUMBER + r"\s*([kmg]?)(bits?/s|bits?|bps|b/s|b|bytes?/s|bytes?)?", re.ASCII)
SLOWEST, FASTEST = 10_000, 100_000_000_000

_DELAYS = {"us": 1, "ms": 1_000, "s": 1_000_000}
_STRICT_DELAY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(us|ms|s)", re.ASCII)
_LONGEST_DELAY = 10_000_000
_MOMENT = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*s?", re.ASCII)


@dataclass(frozen=True)
class Link:
    """Rates of one host's link in bit/s, seen from the host; None is unshaped."""

    up: int | None = None
    down: int | None = None

    def __str__(self) -> str:
        """Return the text that `parse_link` reads back."""
        up, down = format_rate(self.up), format_rate(self.down)
        return up if up == down else f"{up}/{down}"


def parse_rate(text: str) -> int | None:
    """Read one rate in bit/s; `unshaped` is None.

    >>> parse_rate("200mbit"), parse_rate("2.5gbit"), parse_rate("unshaped")
    (200000000, 2500000000, None)
    """
    word = text.strip().lower()
    if word == UNSHAPED:
        return None
    match = _STRICT_RATE.fullmatch(word)
    if match is None:
        raise LabInputError(f"{text!r} is not a rate{_hint(word)}")
    rate = round(float(match[1]) * _UNITS[match[2]])
    if not SLOWEST <= rate <= FASTEST:
        between = f"{format_rate(SLOWEST)} and {format_rate(FASTEST)}"
        raise LabInputError(f"rate {text!r} is not between {between}; for no limit write {UNSHAPED!r}")
    return rate


def _hint(word: str) -> str:
    """Suggest a correct rate for a wrong one."""
    usual = f"; write a number and kbit, mbit or gbit, such as '200mbit', or {UNSHAPED!r}"
    if word in {"", "none", "inf", "infinite", "unlimited", "max", "full", "no", "off"}:
        return f"; for no limit write {UNSHAPED!r}"
    match = _LOOSE_RATE.fullmatch(word)
    if match is None:
        return usual
    number, prefix, ending = match[1], match[2], match[3] or ""
    number = "0" + number if number.startswith(".") else number
    if not prefix:
        return f": the unit is missing; did you mean '{number}mbit'?" if not ending else usual
    guess = f"; did you mean '{number}{prefix}bit'?"
    if ending.startswith("byte") or ending in {"bps", "b", "b/s"}:
        guess += f" (or '{float(number) * 8:g}{prefix}bit', if you meant bytes)"
    return guess


def format_rate(rate: int | None) -> str:
    """Write a rate so that `parse_rate` reads exactly the same number.

    >>> format_rate(2_500_000_000), format_rate(123_456), format_rate(None)
    ('2.5gbit', '123.456kbit', 'unshaped')
    """
    if rate is None:
        return UNSHAPED
    unit, size = next(((u, s) for u, s in reversed(_UNITS.items()) if rate >= s), ("kbit", 1_000))
    whole, rest = divmod(rate, size)
    fraction = f"{rest:0{len(str(size)) - 1}d}".rstrip("0")
    return f"{whole}.{fraction}{unit}" if fraction else f"{whole}{unit}"


def parse_link(text: str) -> Link:
    """Read one rate for both directions, or `up/down` as the host sees them.

    >>> parse_link("100mbit/20mbit")
    Link(up=100000000, down=20000000)
    """
    ways = re.split(r"/(?!s\b)", text)  # 'mbit/s' is a wrong unit, which has a better error
    if len(ways) == 2 and not all(way.strip() for way in ways):
        side = "after" if ways[0].strip() else "before"
        raise LabInputError(f"{text!r} has no rate {side} its '/'; for no limit in that direction write {UNSHAPED!r}")
    if len(ways) > 2:
        raise LabInputError(f"{text!r} has {len(ways)} rates; a link is 'rate' or 'up/down', such as '100mbit/20mbit'")
    return Link(parse_rate(ways[0]), parse_rate(ways[-1]))


def parse_links(rates: str | Sequence[str | Link] | None, hosts: int) -> tuple[Link, ...]:
    """Read one link for all hosts, or one per host, as `"1gbit,100mbit/20mbit"` or as a sequence.

    A link for all may be followed by links of single hosts, as `"200mbit,3:20mbit"`.

    >>> [str(link) for link in parse_links("1gbit,100mbit/20mbit", 2)]
    ['1gbit', '100mbit/20mbit']
    >>> [str(link) for link in parse_links("200mbit,2:20mbit", 4)]
    ['200mbit', '200mbit', '20mbit', '200mbit']
    """
    usual, *single = rates.split(",") if isinstance(rates, str) else [""]
    if single and all(":" in one for one in single):
        return _with_single(parse_link(usual), single, hosts)
    given = [UNSHAPED] if rates is None else rates.split(",") if isinstance(rates, str) else list(rates)
    empty = [place for place, one in enumerate(given, 1) if isinstance(one, str) and not one.strip()]
    if empty and len(given) > 1:
        raise LabInputError(f"rate {empty[0]} of {len(given)} in {rates!r} is empty; for no limit write {UNSHAPED!r}")
    if len(given) not in {1, hosts}:
        raise LabInputError(f"{len(given)} rates for {hosts} hosts: give one rate for all, or one per host")
    links = [one if isinstance(one, Link) else parse_link(one) for one in given]
    return tuple(links * hosts if len(links) == 1 else links)


def _with_single(usual: Link, single: Sequence[str], hosts: int) -> tuple[Link, ...]:
    """Links of all hosts: `usual`, but for hosts given as HOST:RATE."""
    links = [usual] * hosts
    named = set[int]()
    for text in single:
        who, _, rate = text.partition(":")
        if not re.fullmatch(r"\s*\d{1,6}\s*", who, re.ASCII):
            raise LabInputError(f"{text.strip()!r} names no host; write HOST:RATE, such as '{hosts - 1}:20mbit'")
        host = int(who)
        if host >= hosts:
            raise LabInputError(f"{text.strip()!r}: there is no host {host} among {hosts}, which are numbered from 0")
        if host in named:
            raise LabInputError(f"host {host} has two rates; give it one")
        named.add(host)
        links[host] = parse_link(rate)
    return tuple(links)


@dataclass(frozen=True)
class LaterLinks:
    """The hosts' links from a moment on, in seconds after the ranks have started."""

    seconds: float
    links: tuple[Link, ...]


def parse_later(texts: Sequence[str], hosts: int) -> tuple[LaterLinks, ...]:
    """Read `SECONDS:RATES`, in the order of time; rates are written as for the start, and are limits.

    >>> [(later.seconds, str(later.links[0])) for later in parse_later(["900s:1gbit", "300s:50mbit"], 2)]
    [(300.0, '50mbit'), (900.0, '1gbit')]
    """
    found = list[LaterLinks]()
    for text in texts:
        moment, _, rates = text.partition(":")
        match = _MOMENT.fullmatch(moment.strip().lower())
        if match is None or not rates.strip():
            raise LabInputError(f"{text!r} is no later rate; write when and how much, such as '300s:50mbit'")
        links = parse_links(rates, hosts)
        if any(rate is None for link in links for rate in (link.up, link.down)):
            raise LabInputError(
                f"{text!r}: a limit cannot be lifted while a lab runs; give a high rate, such as 100gbit"
            )
        found.append(LaterLinks(float(match[1]), links))
    if len({later.seconds for later in found}) < len(found):
        raise LabInputError(f"two of {', '.join(texts)} are of the same moment; leave one out")
    return tuple(sorted(found, key=lambda later: later.seconds))


def parse_latency(text: str | None) -> int | None:
    """Read a delay from one host to another in microseconds; None is none.

    >>> parse_latency("10ms"), parse_latency("0.5ms"), parse_latency(None)
    (10000, 500, None)
    """
    if text is None:
        return None
    match = _STRICT_DELAY.fullmatch(text.strip().lower())
    if match is None:
        raise LabInputError(f"{text!r} is not a delay; write a number and us, ms or s, such as '10ms'")
    delay = round(float(match[1]) * _DELAYS[match[2]])
    if not 0 < delay <= _LONGEST_DELAY:
        raise LabInputError(f"delay {text!r} is not between 1us and {_LONGEST_DELAY // 1_000_000}s")
    return delay
