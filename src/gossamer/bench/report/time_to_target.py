"""When each recipe had the quality that counts, how sure that is, and who cannot be told from the first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev

from gossamer.bench.record import Record, Run
from gossamer.bench.tune.ranking import Gap, gap_of

# A second run of the same command on the same machine was seen to move a recipe's time by as much.
FLOOR = 0.05
FEWEST = 6  # evaluations from which their noise can be told


@dataclass(frozen=True)
class Arrival:
    """When a run had a quality: between two evaluations in a straight line. What it had sent is known where all is."""

    seconds: float
    step: float
    sent: float | None


def arrival(run: Run, target: float, lower_is_better: bool) -> Arrival | None:
    """The first time that a run was at a target, or beyond.

    >>> from gossamer.bench.record import Evaluation
    >>> run = Run("a", "a", evaluations=[Evaluation(5, 10.0, 100, 6.0), Evaluation(10, 20.0, 200, 4.0)])
    >>> arrival(run, 5.0, True), arrival(run, 3.0, True)
    (Arrival(seconds=15.0, step=7.5, sent=150.0), None)
    """
    sign = 1 if lower_is_better else -1
    before = None
    for e in run.evaluations:
        if sign * e.quality <= sign * target:
            if before is None or not math.isfinite(before.quality):
                return Arrival(e.seconds, e.step, e.sent)
            part = (target - before.quality) / (e.quality - before.quality)
            sent = None if e.sent is None or before.sent is None else _between(before.sent, e.sent, part)
            return Arrival(_between(before.seconds, e.seconds, part), _between(before.step, e.step, part), sent)
        before = e
    return None


def _between(low: float, high: float, part: float) -> float:
    return low + part * (high - low)


def last_that_all_reached(record: Record, runs: Sequence[Run]) -> float | None:
    """The best quality that every run had at some time; of those that were judged after their first step."""
    sign = 1 if record.lower_is_better else -1
    bests = list[float]()
    for run in runs:
        seen = [sign * e.quality for e in run.evaluations if e.step and math.isfinite(e.quality)]
        if seen and not run.alone:
            bests.append(min(seen))
    untrained = [sign * e.quality for run in runs for e in run.evaluations if not e.step]
    worst = max(bests, default=None)
    return None if worst is None or any(worst >= q for q in untrained) else sign * worst


def doubt(run: Run, at: Arrival, lower_is_better: bool) -> float:
    """The standard error of an arrival, as a part of it: what noise of the judgements and of the clock make of one run.

    Third differences of a smooth curve are next to nothing, those of noise of deviation s have the deviation s sqrt(20).
    """
    last = [e for e in run.evaluations if math.isfinite(e.quality)][-FEWEST:]
    if len(last) < FEWEST or not at.seconds:
        return 0.0
    q = [e.quality for e in last]
    thirds = [d - 3 * c + 3 * b - a for a, b, c, d in zip(q, q[1:], q[2:], q[3:], strict=False)]
    noise = math.sqrt(fmean(t * t for t in thirds) / 20)
    slope = abs(q[-1] - q[0]) / (last[-1].seconds - last[0].seconds) if last[-1].seconds > last[0].seconds else 0.0
    paces = [(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(last) if b.step > a.step]
    clock = stdev(paces) / fmean(paces) / math.sqrt(len(paces)) if len(paces) > 1 and fmean(paces) else 0.0
    return math.hypot(noise / slope / at.seconds if slope else 1.0, clock)


@dataclass(frozen=True)
class Ratio:
    """One time over another: the geometric mean over seeds, and two bounds that hold with 95 % each; of one seed, itself."""

    mean: float
    low: float
    high: float


def ratio(mine: Sequence[Arrival], others: Sequence[Arrival]) -> Ratio | None:
    """Seed by seed, where both got there on all.

    >>> a, b = Arrival(10.0, 1, 0), Arrival(20.0, 1, 0)
    >>> ratio([a, a], [b, b]), ratio([a], [])
    (Ratio(mean=0.5, low=0.5, high=0.5), None)
    """
    if not mine or len(mine) != len(others) or not all(o.seconds > 0 and m.seconds > 0 for m, o in zip(mine, others)):
        return None
    logs = [math.log(m.seconds / o.seconds) for m, o in zip(mine, others, strict=True)]
    gap = gap_of(logs) if len(logs) > 1 else Gap(logs[0], logs[0], logs[0])
    return Ratio(math.exp(gap.mean), math.exp(gap.low), math.exp(gap.high))


def bounds(times: Sequence[float]) -> tuple[float, float] | None:
    """Two bounds of the mean of some times, that hold with 95 % each; none of a single one.

    >>> bounds([10.0, 10.0]), bounds([10.0])
    ((10.0, 10.0), None)
    """
    if len(times) < 2:
        return None
    gap = gap_of(times)
    return max(0.0, gap.low), gap.high


def tied(mine: Sequence[Arrival], first: Sequence[Arrival], doubts: tuple[float, float]) -> bool:
    """Whether nobody should say which of the two was sooner: by seeds where there are some, else by what one run tells."""
    found = ratio(mine, first)
    if found is None:
        return False
    if len(mine) > 1:
        return found.low <= 1 <= found.high
    return abs(math.log(found.mean)) <= max(math.log1p(FLOOR), 2 * math.hypot(*doubts))
