"""Where a process's time went, by its own clock: steps, and what else there was, by cause.

A process is cut into stretches of a few steps, with an exchange in each. Medians over them say how long a step computes, and
for how long an exchange is waited for, where nothing happens. What a stretch takes beyond that is no step: it was waited, or the
loop stood still.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from gossamer.costs.run_files import ProcessEvents

HALF, TENTH = 0.5, 0.1  # of a step, and of a stretch: by so much steps vary where nothing happens
CAUSES = {
    "steps": "steps that count",
    "starting": "starting",
    "waiting": "waiting for others",
    "saving": "saving",
    "again": "steps done again",
    "lost": "lost",
    "standing": "standing still",
}


@dataclass(frozen=True)
class Spent:
    """Seconds by cause, see `CAUSES`; together they are all of the time. `exchange` is a part of `steps`, `counted` their number.

    >>> (Spent(steps=8.0, starting=1.5) + Spent(waiting=0.5)).share
    0.8
    """

    steps: float = 0.0
    starting: float = 0.0  # from the process's start to its first step
    waiting: float = 0.0  # beyond the usual exchange
    saving: float = 0.0
    again: float = 0.0  # steps that a later process did again
    lost: float = 0.0  # steps that nobody has, and the one that was under way at the end
    standing: float = 0.0  # all else: evaluations, data, the time between two processes
    exchange: float = 0.0
    counted: float = 0.0

    @property
    def by_cause(self) -> dict[str, float]:
        return {cause: getattr(self, cause) for cause in CAUSES}

    @property
    def paid(self) -> float:
        return sum(self.by_cause.values())

    @property
    def share(self) -> float:
        """The share of the time that became steps that count."""
        return self.steps / self.paid if self.paid else 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class TypicalStep(NamedTuple):
    """Typical seconds of a step's own computing, and of the exchange after `period` steps, for which the loop stands still."""

    own: float = 0.0
    exchange: float = 0.0
    period: int = 1

    @property
    def step(self) -> float:
        return self.own + self.exchange / self.period


class Stretch(NamedTuple):
    """A few steps of a process, from the end of one to the end of another."""

    began: float
    ended: float
    after: int  # the number of the step before the first
    last: int
    steps: int
    exchanges: int
    waited: float
    saved: float

    @property
    def own(self) -> float:
        return self.ended - self.began - self.waited - self.saved


class Fate(NamedTuple):
    """What became of a process's steps: later than `again` they were done again, later than `lost` nobody has them."""

    again: float = float("inf")
    lost: float = float("inf")

    def before(self, process: ProcessEvents, at: float) -> "Fate":
        """What became of its steps up to some time: it may have loaded a checkpoint later, and begun again there."""
        return self._replace(again=min([self.again, *(s.step for s in process.starts if s.at > at)]))

    def shares(self, after: int, last: int) -> tuple[float, float]:
        """The shares of some steps that were done again, and that were lost."""
        steps = max(1, last - after)
        again = min(steps, max(0.0, last - max(after, self.again)))
        lost = min(steps - again, max(0.0, min(last, self.again) - max(after, self.lost)))
        return again / steps, lost / steps


KEPT = Fate()


def stretches(process: ProcessEvents) -> list[Stretch]:
    """Cut a process, from the end of its first step to the end of its last, into stretches with an exchange or more in each.

    What is left at the end, or before a checkpoint was loaded, joins the stretch before it.
    """
    out, ends = list[Stretch](), [s.at for s in process.saves]
    for a, b in pairwise(process.counts):
        loaded = next((s.step for s in process.starts if a.at < s.at <= b.at), None)
        saved = min(
            b.at - a.at, sum(s.seconds for s in process.saves[bisect_right(ends, a.at) : bisect_right(ends, b.at)])
        )
        waited = min(b.at - a.at - saved, b.waited - a.waited)
        after, steps = a.step if loaded is None else loaded, b.done - a.done
        exchanges = b.step // process.period - after // process.period if process.period > 1 else steps
        new = Stretch(a.at, b.at, after, b.step, steps, exchanges, waited, saved)
        follows = bool(out) and loaded is None and not out[-1].exchanges
        out[-1:] = [_joined(out[-1], new)] if follows else [*out[-1:], new]
    if len(out) > 1 and not out[-1].exchanges and out[-2].last == out[-1].after:
        out[-2:] = [_joined(*out[-2:])]
    return out


def _joined(one: Stretch, next: Stretch) -> Stretch:
    summed = {name: getattr(one, name) + getattr(next, name) for name in ("steps", "exchanges", "waited", "saved")}
    return one._replace(ended=next.ended, last=next.last, **summed)


def typical(found: Iterable[Stretch], period: int) -> TypicalStep:
    """What steps and exchanges take where nothing happens: medians over steps, each counted with its stretch's mean."""
    those = list(found)
    own = _median([(s.own / s.steps, s.steps) for s in those if s.steps])
    return TypicalStep(own, _median([(s.waited / s.exchanges, s.exchanges) for s in those if s.exchanges > 0]), period)


def _median(weighted: Sequence[tuple[float, int]]) -> float:
    """The value that half of the weight is not above.

    >>> _median([(1.0, 5), (9.0, 1), (2.0, 4)]), _median([])
    (1.0, 0.0)
    """
    half, so_far = sum(weight for _, weight in weighted) / 2, 0
    for value, weight in sorted(weighted):
        so_far += weight
        if so_far >= half:
            return value
    return 0.0


def spent_by(process: ProcessEvents, cut: Sequence[Stretch], pace: TypicalStep, fate: Fate = KEPT) -> Spent:
    """The seconds of one process, by cause."""
    if not process.counts:
        return Spent(starting=process.end)
    first = process.counts[0]
    step = min(pace.step, first.at)
    total = Spent(starting=first.at - step)
    total += _steps(
        step, min(pace.exchange / pace.period, step), process.first, first.step, fate.before(process, first.at)
    )
    for stretch in cut:
        total += _of_stretch(stretch, pace, fate.before(process, stretch.ended))
    return total + _tail(process, pace)


def _of_stretch(stretch: Stretch, pace: TypicalStep, fate: Fate) -> Spent:
    waiting = stretch.waited - pace.exchange * stretch.exchanges
    standing = stretch.own - pace.own * stretch.steps
    if waiting + standing <= pace.step * (HALF + TENTH * stretch.steps):
        waiting = standing = 0.0
    waiting, standing = max(0.0, waiting), max(0.0, standing)
    seconds = stretch.ended - stretch.began - stretch.saved - waiting - standing
    steps = _steps(seconds, stretch.waited - waiting, stretch.after, stretch.last, fate)
    return steps + Spent(waiting=waiting, saving=stretch.saved, standing=standing)


def _steps(seconds: float, exchange: float, after: int, last: int, fate: Fate) -> Spent:
    again, lost = fate.shares(after, last)
    counts = 1 - again - lost
    return Spent(
        steps=seconds * counts,
        again=seconds * again,
        lost=seconds * lost,
        exchange=exchange * counts,
        counted=max(1, last - after) * counts,
    )


def _tail(process: ProcessEvents, pace: TypicalStep) -> Spent:
    """The time after the last step: saves, waits that may never have ended, and the step under way where it was killed."""
    since = process.counts[-1].at
    rest = process.end - since
    saving = min(rest, sum(s.seconds for s in process.saves if s.at > since))
    # A wait is told again and again while it goes on; the last time counts.
    told = {wait.since: wait.at - wait.since for wait in process.waits if wait.at > since}
    waiting = min(rest - saving, sum(told.values()))
    rest -= saving + waiting
    lost = min(rest, pace.step) if process.ended is None else 0.0
    return Spent(saving=saving, waiting=waiting, lost=lost, standing=rest - lost)
