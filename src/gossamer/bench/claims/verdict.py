"""Verdicts: what differences over seeds, or values that theory predicts, say of a statement.

One-sided bounds of the mean over seeds, each with 95 per cent (Student's t). Whatever is not finite gives `not`, with
the reason: a method that diverges on one seed is not as good as one that does not.

>>> no_worse({30: 0.001, 31: 0.002, 32: -0.001}, margin=0.02).verdict
'holds'
>>> better({30: 0.1, 31: 0.3, 32: -0.2}).verdict
'partly'
"""

import math
from collections.abc import Callable, Container, Mapping
from typing import Literal, NamedTuple

from gossamer.bench.tune.ranking import Gap, gap_of

Verdict = Literal["holds", "partly", "not", "waiting", "stale"]
ORDER: tuple[Verdict, ...] = ("holds", "partly", "not")  # from the best to the worst
ENOUGH = 0.9  # of the paper's factor


class Judgement(NamedTuple):
    verdict: Verdict
    found: str  # in words, with numbers
    effect: Gap | None = None
    unit: str = ""
    spoilt: tuple[int, ...] = ()  # seeds whose value is not finite; of a range, those that lie in it all the same


def no_worse(apart: Mapping[int, float], margin: float, unit: str = "") -> Judgement:
    """By seed, how much worse the method is. Holds if the upper bound is within the margin; partly if the mean is."""
    return _judged(apart, unit, f"no worse by more than {margin:g}", lambda g: (g.high <= margin, g.mean <= margin))


def better(gains: Mapping[int, float], unit: str = "") -> Judgement:
    """By seed, how much better the method is. Holds if the lower bound is above 0; partly if the mean is.

    Of two equal methods one is better in the mean in half of all draws: `partly`; that it holds is rare, 5 % of them.
    """
    return _judged(gains, unit, "better", lambda g: (g.low > 0, g.mean > 0))


def at_most(values: Mapping[int, float], bar: float, unit: str = "") -> Judgement:
    """By seed, a value. Holds if the upper bound is at most the bar; partly if the mean is."""
    return _judged(values, unit, f"at most {bar:g}", lambda g: (g.high <= bar, g.mean <= bar))


def at_least(values: Mapping[int, float], bar: float, unit: str = "") -> Judgement:
    """By seed, a value. Holds if the lower bound is at least the bar; partly if the mean is."""
    return _judged(values, unit, f"at least {bar:g}", lambda g: (g.low >= bar, g.mean >= bar))


def banded(planned: Judgement, *ends: Judgement) -> Judgement:
    """A statement of time: it holds where it does as planned and at both ends of the planner's error, else at most partly.

    >>> shown, missed = better({30: 0.29, 31: 0.3}), better({30: -0.2, 31: -0.3})
    >>> [banded(shown, shown, shown).verdict, banded(shown, shown, missed).verdict, banded(missed, shown, shown).verdict]
    ['holds', 'partly', 'not']
    """
    if planned.verdict not in ("holds", "partly"):
        return planned
    all_hold = all(each.verdict == "holds" for each in (planned, *ends))
    band = "; ".join(f"{each.verdict}, {each.found}" for each in ends)
    return planned._replace(
        verdict="holds" if all_hold else "partly", found=f"{planned.found}; at the ends of the band: {band}"
    )


def times(ratios: Mapping[int, float], paper: float) -> Judgement:
    """By seed, how many times better. Holds from .9 of the paper's factor on; partly if the lower bound is above 1."""
    return _judged(ratios, "x", f"{paper:g} times", lambda g: (g.low >= ENOUGH * paper, g.low > 1))


def within(values: Mapping[int, float], low: float, high: float, unit: str = "") -> Judgement:
    """Theory, by seed: each value lies in a range. Partly if only some do."""
    inside = [low <= v <= high for v in values.values()]  # not a number lies nowhere
    verdict: Verdict = "not" if not any(inside) else "holds" if all(inside) else "partly"
    ends = f"between {_short(low)} and {_short(high)}" if math.isfinite(low + high) else _one_end(low, high)
    least, most = min(values.values(), default=math.nan), max(values.values(), default=math.nan)
    endless = tuple(s for s, v in values.items() if low <= v <= high and not math.isfinite(v))
    spoilt = _spoilt(values)
    said = f"{sum(inside)} of {len(inside)} seeds {ends}: " + (spoilt or f"{_short(least)} to {_short(most)}")
    return Judgement(verdict, said, None, unit, endless) if values else _none()


def slope_within(slopes: Mapping[int, float], low: float, high: float) -> Judgement:
    """Holds if the interval of the mean slope lies in a range; partly if it overlaps with it."""
    said = f"a slope between {_short(low)} and {_short(high)}"
    return _judged(slopes, "", said, lambda g: (low <= g.low and g.high <= high, g.low <= high and g.high >= low))


def all_of(parts: Mapping[str, Judgement]) -> Judgement:
    """Several conditions of one statement: the worst of their verdicts."""
    waiting = [p for p in parts.values() if p.verdict not in ORDER]
    if waiting or not parts:
        return waiting[0] if waiting else _none()
    worst: Verdict = next(v for v in ORDER[::-1] if any(p.verdict == v for p in parts.values()))
    said = "; ".join(f"{name}: {p.verdict} ({p.found})" for name, p in parts.items())
    only = next(iter(parts.values())) if len(parts) == 1 else None
    return Judgement(worst, said, only.effect if only else None, only.unit if only else "")


def counted(parts: Mapping[str, Judgement], holds: int, partly: int) -> Judgement:
    """So many of several conditions: those that hold, and those that hold at least in mean."""
    shown = sum(p.verdict == "holds" for p in parts.values())
    mean = sum(p.verdict in ("holds", "partly") for p in parts.values())
    verdict: Verdict = "holds" if shown >= holds else "partly" if mean >= partly else "not"
    said = "; ".join(f"{name}: {p.verdict} ({p.found})" for name, p in parts.items())
    return Judgement(verdict, f"{shown} of {len(parts)} hold, {mean} at least in mean: {said}")


def beside_reference(found: Judgement, diverged: Container[int]) -> Judgement:
    """A seed on which the reference diverged shows nothing, whatever a rule makes of a value that is not finite.

    >>> nothing_gained = better({30: -0.1, 31: math.nan})._replace(verdict="holds")
    >>> beside_reference(nothing_gained, {31}).verdict, beside_reference(nothing_gained, {32}).verdict
    ('not', 'holds')
    """
    lost = [str(seed) for seed in found.spoilt if seed in diverged]
    if not lost or found.verdict not in ("holds", "partly"):
        return found
    return Judgement("not", f"the reference diverged with seed {', '.join(lost)}", None, found.unit)


def gaps(method: Mapping[int, float], reference: Mapping[int, float], start: Mapping[int, float]) -> dict[int, float]:
    """By seed, the share of the reference's progress that the method lost: free of the scale of a loss.

    >>> gaps({30: 1.2}, {30: 1.0}, {30: 3.0})
    {30: 0.09999999999999998}
    """
    return {s: _over(method[s] - reference[s], start[s] - reference[s]) for s in method}


def apart(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """By seed, one less the other."""
    return {s: one[s] - other[s] for s in one}


def ratios(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {s: _over(one[s], other[s]) for s in one}


def _over(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def _judged(values: Mapping[int, float], unit: str, rule: str, judge: Callable[[Gap], tuple[bool, bool]]) -> Judgement:
    spoilt = _spoilt(values)
    if spoilt:
        return Judgement("not", spoilt, None, unit, tuple(s for s, v in values.items() if not math.isfinite(v)))
    if len(values) < 2:
        return _none()
    gap = gap_of([*values.values()])
    holds, partly = judge(gap)
    verdict: Verdict = "holds" if holds else "partly" if partly else "not"
    tail = f" {unit}" if unit else ""
    found = f"{_short(gap.mean)} [{_short(gap.low)}, {_short(gap.high)}]{tail} over {len(values)} seeds ({rule})"
    return Judgement(verdict, found, gap, unit)


def _spoilt(values: Mapping[int, float]) -> str:
    bad = [s for s, v in values.items() if not math.isfinite(v)]
    return f"not a finite number with seed {', '.join(map(str, bad))}" if bad else ""


def _none() -> Judgement:
    return Judgement("waiting", "fewer than two seeds have run")


def _one_end(low: float, high: float) -> str:
    return f"at most {_short(high)}" if math.isfinite(high) else f"at least {_short(low)}"


def _short(value: float) -> str:
    return f"{value:.3g}"
