"""How `auto` watches what it has chosen, and what it remembers: it measures anew, or goes back to dense for good."""

import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

from gossamer.controllers.auto_candidates import window_of
from gossamer.controllers.auto_choice import (
    Timing,
    differs,
    mean_losses,
    order,
    predicted,
    ready_by_share,
    rises,
    timing_of,
)
from gossamer.controllers.auto_replay import DENSE
from gossamer.controllers.auto_state import ON_DENSE, AutoState
from gossamer.controllers.auto_table import ERRORS
from gossamer.core.bucket import State
from gossamer.core.contracts import CandidateCost, Facts, RankTimes

# Steps after which there are trials if dense is predicted to take twice as long. One compiles, candidates run beside the
# second, and the third is timed.
SOON = 3
QUICK = 4  # steps after which there are, if it is far slower; three are timed
MEASURING = 15  # steps where it is not, with those four: three that compile, then twelve
EVERY = 50  # steps of a window once it has chosen, but for the first
REST, TRIES = 200, 10  # steps between a choice and the next measuring, and how often there is one
WIDTH = len(CandidateCost._fields)
ELSEWHERE = "another world or machine"
HARMLESS = 0.1  # of a gradient's length, lost: a hundredth of its variance, which a batch's own noise hides


class AutoOptions(NamedTuple):
    """The arguments of `auto`: the candidates, which of them may follow on one another without dense steps between them, the gain
    that one must have, and the length of the run, if it is known; and the most steps that measuring and trials may take.
    """

    allow: tuple[str, ...]
    direct: Sequence[bool]
    gain: float
    steps: int | None
    most: int

    @property
    def is_too_short(self) -> bool:
        """True if the run would end before a choice could pay."""
        return self.steps is not None and self.steps <= self.most

    def name_of(self, number: int) -> str:
        return DENSE if number == ON_DENSE else self.allow[number]


class AutoWatch:
    """A decision of `auto` once it has chosen: reads what it remembers from the state, and writes what follows.

    `phase` is missing while it measures; then 1 during trials, 2 once it has chosen. Numbers of candidates count from 0.
    """

    def __init__(self, options: AutoOptions, facts: Facts, state: State, recipe_of: Callable[[int], Any]) -> None:
        self.options, self.facts, self.kept, self.recipe_of = options, facts, AutoState(state), recipe_of
        self.number = self.kept.whole("choice", ON_DENSE)  # in force

    # -- going on ----------------------------------------------------------------------------------------------------

    def _watched(self) -> int:
        times = self.facts.times
        seen = timing_of(times)
        self._window(self.number, EVERY, EVERY)
        if self.number != ON_DENSE and (reason := self._harm(times)):
            return self._bar(reason)
        if self.kept.all("place") and self._place() != self.kept.all("place"):
            return self._measure_anew(ELSEWHERE)
        if not seen.steps.known or not self.kept.all("costs"):
            return self.number
        if seen.slow and "named" not in self.kept:
            self.kept.write("named", 1)
            self.facts.tell(f"auto: nothing changes because {seen.slow}: that is not the network")
        guesses = self._predicted(seen)
        wanted = next(iter(order(guesses, self.options.gain, self._barred())), ON_DENSE)
        is_off = wanted != self.number and self._is_another_network(seen, guesses)
        off = self.kept.whole("off") + 1 if is_off else 0
        self.kept.write("off", off)
        rested = self.facts.step - self.kept.whole("since") >= REST and self.kept.whole("tries") < TRIES
        if off < 2 or not rested:
            return self.number
        if self.number != ON_DENSE:
            self.kept.write_all("left", [self.number, seen.steps.middle])
        return self._measure_anew("other times")

    def _is_another_network(self, seen: Timing, guesses: Sequence[float]) -> bool:
        """True if the step, or what dense would take now, is not what was measured when the choice was made.

        Under a candidate that sends little a step hardly gets shorter on a faster network, and dense's would.
        """
        return differs(seen.steps.middle, self.kept.number("expected")) or differs(
            guesses[0], self.kept.all("dense")[1]
        )

    def _predicted(self, seen: Timing) -> list[float]:
        numbers = self.kept.all("costs")
        costs = [CandidateCost(*numbers[i : i + WIDTH]) for i in range(0, len(numbers), WIDTH)]
        now, sizes = None if self.number == ON_DENSE else costs[self.number], self._sizes()
        usual = self.kept.number("computing")
        if "latency" in self.kept:  # which a run that was resumed has not measured
            seen = seen._replace(latency=self.kept.number("latency"))
        if now is not None and now.every:  # no average starts in backward, so that nothing was measured of it
            ready = ready_by_share(self.kept.all("ready"), [int(size) for size in self.kept.all("sizes")], sizes)
            pace = seen.computing / usual if usual else 1.0
            seen = seen._replace(ready=[moment * pace for moment in ready])
        late = max(seen.computing - usual, 0.0) if seen.slow else 0.0
        return predicted(seen, sizes, costs, now, late, self._cuts(sizes))

    def _harm(self, times: Sequence[RankTimes]) -> str:
        """Why what is in force should not be, if so."""
        name, error = self.options.name_of(self.number), max(rank.error for rank in times)
        known = ERRORS.get(name)
        if known is not None and isfinite(error) and error > max(2 * known, HARMLESS):
            return f"its compression error is {error:.3g}, and over twice the {known:.3g} of the table"
        if "judged" in self.kept:
            return ""
        after = [*self.kept.all("after"), *mean_losses(times)]
        self.kept.write_all("after", after)
        if self.facts.step - self.kept.whole("since") < EVERY:
            return ""
        self.kept.write("judged", 1)
        is_worse = rises(self.kept.all("before"), after[:EVERY])
        return f"the loss of {EVERY} steps lies above its trend by more than its noise" if is_worse else ""

    def _is_spoilt(self) -> bool:
        """Count averages that are not finite, and say if what is in force has more of them than dense had."""
        own = "" if self.number != ON_DENSE else "dense_"
        seen = self.kept.count(f"{own}seen")
        if self.facts.finite:
            return False
        lost = self.kept.count(f"{own}lost")
        dense_lost, dense_seen = self.kept.whole("dense_lost"), self.kept.whole("dense_seen")
        if not dense_lost:  # a few steps are not enough to know how seldom it loses one
            dense_seen = max(dense_seen, MEASURING)
        return not own and lost >= 2 and lost * dense_seen > (dense_lost + 1) * seen

    def _measure_anew(self, why: str) -> int:
        self.kept.count("tries")
        self.kept.forget("phase", "looked", "again")
        self._window(ON_DENSE, 1, SOON)
        self.facts.tell(f"auto measures again: {why}")
        return self._adopt(ON_DENSE, tells=True)

    def _bar(self, reason: str) -> int:
        """Back to dense for good."""
        step, name = self.facts.step + 1, self.options.name_of(self.number)
        word = f"auto: dense from step {step} for good, after {name}: {reason}"
        warnings.warn(word, RuntimeWarning, stacklevel=2)
        self.kept.write_all("barred", [1.0] * len(self.options.allow))
        self.kept.write("phase", 2)
        self.kept.write("tries", TRIES)
        self.kept.write("expected", float("nan"))
        self._window(ON_DENSE, EVERY, EVERY)
        self.facts.tell(word)
        return self._adopt(ON_DENSE, tells=False)

    # -- what it remembers -------------------------------------------------------------------------------------------

    def _adopt(self, number: int, tells: bool) -> int:
        if number != self.number:
            self.kept.write("choice", number)
            self.kept.write("adopted", self.facts.step)
            self.kept.write("seen", 0)
            self.kept.write("lost", 0)
            if tells:
                self.facts.tell(f"auto tries {self.options.name_of(number)} from step {self.facts.step + 1}")
        return number

    def _window(self, number: int, rows: int, steps: int) -> None:
        """Look at `rows` steps of what is in force then, in so many steps from now; under rounds at whole ones."""
        rows, until = window_of(self.recipe_of(number).schedule, self.facts.step, rows, steps)
        self.kept.write("rows", rows)
        self.kept.write("until", until)

    def _barred(self) -> list[bool]:
        return [bool(each) for each in self.kept.all("barred")] or [False] * len(self.options.allow)

    def _sizes(self) -> list[int]:
        """The elements of each block, of all shards together, so that all of them predict the same."""
        own, over = [block.layout.numel for block in self.facts.blocks], self.facts.over_shards
        return own if over is None else [int(size) for size in over(own)]

    def _cuts(self, sizes: list[int]) -> list[list[int]]:
        """The elements of each block, now `sizes`, under dense and each candidate: the more blocks, the sooner the first leaves."""
        count, under, sharded = 1 + len(self.options.allow), self.facts.sizes_under, self.facts.over_shards
        if under is None or sharded is not None:  # shards may be cut at other places
            return [sizes] * count
        return [under(self.recipe_of(number)) for number in range(ON_DENSE, count - 1)]

    def _place(self) -> list[float]:
        """The world and its machines."""
        return [float(self.facts.size), sum(rank.machine for rank in self.facts.times)]
