"""Standings: what the seeds that nobody searched on say of the best of each recipe.

The best of K trials looks better than it is, for it was chosen for that. So it is judged again on other seeds, the same for
all recipes, and compared seed by seed: same model, same batches. Two bounds hold the mean difference, each with 95 per cent
(Student's t); if zero lies between them, these seeds show no difference, and nobody is ranked above the other.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from gossamer.bench.tune.knobs import LR
from gossamer.bench.tune.record import Candidate, Trial, Tuning

# Student's t at 95 per cent, one side, by degrees of freedom.
STUDENT = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753]
MANY = 1.75

Verdict = Literal[
    "baseline", "better", "worse", "no difference", "one seed", "no baseline", "diverges", "nothing", "not judged"
]


@dataclass(frozen=True)
class Gap:
    """A mean difference between its bounds; positive is worse."""

    mean: float
    low: float
    high: float

    @property
    def shown(self) -> bool:
        """Whether there is a difference at all."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Ranked:
    """One recipe's best, and how it did on the other seeds."""

    contender: Candidate
    best: Trial | None
    judged: dict[int, Trial]
    mean: float | None  # quality over the other seeds
    gap: Gap | None  # to the baseline
    verdict: Verdict
    tied: bool  # with the one that has the best mean: no difference is shown, or one seed cannot show any


def ranking(tuning: Tuning) -> list[Ranked]:
    """The best mean first; recipes without one last."""
    bests = [(c, tuning.best(c.name)) for c in tuning.contenders]
    rows = [(c, best, tuning.judged(best) if best else {}) for c, best in bests]
    leader = min(
        (j for *_, j in rows if _mean(j) is not None), key=lambda j: tuning.sign() * (_mean(j) or 0.0), default={}
    )
    base = rows[0][2] if rows else {}
    out = [_standing(tuning, c, best, judged, base, leader) for c, best, judged in rows]
    return sorted(out, key=lambda s: (s.mean is None, tuning.sign() * (s.mean or 0.0)))


def _standing(
    tuning: Tuning,
    contender: Candidate,
    best: Trial | None,
    judged: dict[int, Trial],
    base: dict[int, Trial],
    leader: dict[int, Trial],
) -> Ranked:
    gap, mean = _gap(tuning, judged, base), _mean(judged)
    verdict = _verdict(best, judged, gap, contender is tuning.contenders[0], _mean(base) is not None)
    ahead = _gap(tuning, judged, leader)
    tied = mean is not None and (judged is leader or ahead is None or not ahead.shown)
    return Ranked(contender, best, judged, mean, gap, verdict, tied)


def _verdict(best: Trial | None, judged: dict[int, Trial], gap: Gap | None, is_base: bool, has_base: bool) -> Verdict:
    if best is None:
        return "nothing"
    if any(t.outcome != "ok" for t in judged.values()):
        return "diverges"
    if not judged:
        return "not judged"
    if is_base:
        return "baseline"
    if gap is None:
        return "one seed" if has_base else "no baseline"
    return "no difference" if not gap.shown else "worse" if gap.low > 0 else "better"


def _gap(tuning: Tuning, judged: dict[int, Trial], other: dict[int, Trial]) -> Gap | None:
    """Over the seeds that both have; None for fewer than two."""
    if _mean(judged) is None or _mean(other) is None:
        return None
    apart = [tuning.sign() * (judged[s].quality - other[s].quality) for s in judged if s in other]
    return gap_of(apart) if len(apart) > 1 else None


def gap_of(apart: Sequence[float]) -> Gap:
    """The mean of two or more differences, and its bounds.

    >>> gap_of([0.1, 0.2, 0.3]).shown, gap_of([-0.1, 0.1, 0.05]).shown
    (True, False)
    """
    half = student(len(apart) - 1) * stdev(apart) / math.sqrt(len(apart))
    return Gap(fmean(apart), fmean(apart) - half, fmean(apart) + half)


def student(freedom: int) -> float:
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else MANY


def _mean(judged: dict[int, Trial]) -> float | None:
    """None too where one of them diverged: a mean of the others would hide it."""
    if not judged or any(t.outcome != "ok" for t in judged.values()):
        return None
    return fmean(t.quality for t in judged.values())


def at_an_end(contender: Candidate, best: Trial) -> str:
    """Which end of the learning rates that were searched the best lies near, if any: further out it may be better."""
    rates = [float(number) for number in re.findall(r"[\d.]+(?:e[+-]?\d+)?", contender.knobs.get(LR, ""))]
    if not rates or min(rates) == max(rates):
        return ""
    return "lowest" if best.lr < 1.25 * min(rates) else "highest" if 1.25 * best.lr > max(rates) else ""
