"""Numbers and networks in plain words, the same on the page, in Markdown and in figures."""

import math
import re
from collections.abc import Iterable, Mapping

from gossamer.core.text import listed

MINUS = "\N{MINUS SIGN}"
LARGE = 1e6  # from here on a loss is written as a power of ten: it has diverged


def number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, with thin groups of thousands.

    >>> [number(v) for v in (4.1, 0.1842, 12.34, 0.0000213, 0.0, -2.5, 1.234e34)]
    ['4.10', '0.184', '12.3', '2.1e-05', '0', '−2.50', '1.2e+34']
    """
    if value is None or not math.isfinite(value):
        return "not finite" if value is not None else "–"
    if value < 0:
        return MINUS + number(-value, digits)
    if value == 0:
        return "0"
    if value < 0.001 or value >= LARGE:
        return f"{value:.{digits - 2}e}"
    if value >= 10 ** (digits - 1) - 0.5:
        return f"{value:,.0f}".replace(",", "\N{NO-BREAK SPACE}")
    # The decimals follow from the number as it will be shown: 9.996 is 10.0, not 10.00.
    shown = float(f"{value:.{digits - 1}e}")
    return f"{value:.{digits - 1 - math.floor(math.log10(shown))}f}"


def fixed(value: float, decimals: int) -> str:
    """So many decimals; a power of ten for a loss that has diverged.

    >>> fixed(0.1842, 3), fixed(1.234e34, 3), fixed(math.inf, 3)
    ('0.184', '1.2e+34', 'inf')
    """
    return f"{value:.{decimals}f}" if abs(value) < LARGE else f"{value:.1e}"


def seconds(value: float | None) -> str:
    """A duration that one can say aloud.

    >>> [seconds(v) for v in (0.2114, 4.26, 31.2, 172.0, 1500.0, 9000.0)]
    ['211 ms', '4.26 s', '31.2 s', '172 s', '25 min', '2.5 h']
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if value < 0.9995:
        return f"{number(value * 1e3)} ms"
    if value < 1000:
        return f"{number(value)} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h"


def size(value: float | None) -> str:
    """Bytes in decimal units, as network people count.

    >>> [size(v) for v in (0, 999, 34_900_000, 5_240_000_000)]
    ['0 B', '999 B', '34.9 MB', '5.24 GB']
    """
    if value is None or not math.isfinite(value):
        return number(value)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or (unit == "B" and value < 1000):
            return f"{value:.0f} B" if unit == "B" else f"{number(value)} {unit}"
        value /= 1e3
    return f"{number(value)} TB"


def rate(text: str) -> str:
    """The network of a record, spelt out.

    >>> rate("200mbit"), rate("1gbit,100mbit"), rate("unshaped")
    ('200 Mbit/s', '1 Gbit/s, 100 Mbit/s', 'an unshaped network')
    >>> rate("200mbit,3:20mbit")
    '200 Mbit/s, host 3 at 20 Mbit/s'
    """
    if text == "unshaped":
        return "an unshaped network"
    units = {"k": "kbit/s", "m": "Mbit/s", "g": "Gbit/s"}
    spelt = re.sub(r"(\d)\s*([kmg])bit\b", lambda m: f"{m[1]} {units[m[2].lower()]}", text, flags=re.IGNORECASE)
    return re.sub(r"\b(\d+):", r"host \1 at ", re.sub(r",\s*", ", ", spelt))


def ranks_on(hosts: int, per_host: int = 1) -> str:
    """How many hosts, and how many ranks on each where there are several.

    >>> ranks_on(4), ranks_on(2, 4)
    ('4 hosts', '2 hosts of 4 ranks')
    """
    return f"{hosts} host{'s' * (hosts != 1)}" + (f" of {per_host} ranks" if per_host > 1 else "")


def severe(severity: float | None) -> str:
    """How slow the network is for this model, after what else is said of both; nothing where it is not known or has no limit.

    >>> severe(7.73), severe(None)
    (', severity 7.7', '')
    """
    return f", severity {number(severity, 2)}" if severity else ""


def seeds_of(seeds: Iterable[int]) -> str:
    """
    >>> seeds_of([7]), seeds_of([0, 1, 2])
    ('seed 7', 'seeds 0, 1 and 2')
    """
    texts = [str(s) for s in seeds]
    return f"seed{'s' * (len(texts) > 1)} {listed(texts)}"


def subject(summary: str) -> str:
    """What was trained; what its data costs to fetch is for those who choose a workload.

    >>> subject("digits, two-layer perceptron, 4.8 k parameters, 9 MB download")
    'digits, two-layer perceptron, 4.8 k parameters'
    """
    return re.sub(r", (no|[\d.]+ [kMG]B) download\b.*$", "", summary)


def times(ratio: float | None) -> str:
    """How many times the baseline's.

    >>> times(0.0383), times(1.0), times(12.4)
    ('0.038×', '1.0×', '12×')
    """
    return number(ratio, 2) + ("" if ratio is None else "×")


def moment(created: str) -> str:
    """A time of ISO 8601 for a reader.

    >>> moment("2026-11-21T05:51:11+00:00"), moment("")
    ('2026-11-21 05:51 UTC', '')
    """
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1 \2 UTC", created)


def quality(metric: str) -> str:
    """The metric's name in a sentence: its unit is for axes, and a bare word says that the data was held out.

    >>> quality("loss"), quality("held-out loss (nats/byte)"), quality("excess loss over the optimum")
    ('held-out loss', 'held-out loss', 'excess loss over the optimum')
    """
    bare = re.sub(r"\s*\([^()]*\)$", "", metric)
    return f"held-out {bare}" if bare.isalpha() else bare


def glued(text: str) -> str:
    """A sentence that is never broken between a number and its unit, nor within "held-out".

    >>> glued("held-out loss 4.98: 16.4 s, 174 MB")
    'held\u2011out loss 4.98: 16.4\xa0s, 174\xa0MB'
    """
    apart = r"(?<=\d) (?=(?:ms|s|min|h|%|[kMGT]?B|[kMG]bit/s)(?:\W|$))"
    return re.sub(apart, "\N{NO-BREAK SPACE}", text).replace("held-out", "held\N{NON-BREAKING HYPHEN}out")


def capital(text: str) -> str:
    """As a sentence begins; `str.capitalize` would lower the rest."""
    return text[:1].upper() + text[1:]


def spoilt(steps: int, rounds: int, by: Mapping[str, int]) -> str:
    """What was lost to values that are not finite, and who sent them; several ranks may have spoilt one step.

    >>> spoilt(3, 0, {"0": 1, "1": 2}), spoilt(0, 1, {"2": 1})
    ('3 steps skipped, 2 of them spoilt by rank 1, 1 of them spoilt by rank 0', '1 round dropped, spoilt by rank 2')
    """
    lost = {"skipped": ("step", steps), "dropped": ("round", rounds)}
    told = [f"{n} {thing}{'s' * (n > 1)} {how}" for how, (thing, n) in lost.items() if n]
    all_of_them = steps + rounds

    def share(n: int) -> str:
        return "spoilt" if all_of_them == 1 else f"{'all' if n == all_of_them else n} of them spoilt"

    worst_first = sorted(by.items(), key=lambda entry: -entry[1])
    return ", ".join([" and ".join(told), *(f"{share(n)} by rank {rank}" for rank, n in worst_first)]) if told else ""


def staleness(ages: Mapping[str, int]) -> str:
    """How old answers were when they landed.

    >>> staleness({"1": 3, "2": 1}), staleness({})
    ('models were 1.2 steps old when they landed, 2 at most', '')
    """
    if not ages:
        return ""
    mean = sum(int(age) * n for age, n in ages.items()) / sum(ages.values())
    return f"models were {mean:.1f} steps old when they landed, {max(map(int, ages))} at most"
