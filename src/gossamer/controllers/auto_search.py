"""The search of `auto`: one decision at a time, from what ranks measured and what earlier decisions left in the state."""

import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, NamedTuple

from gossamer.controllers.auto_candidates import TRIED, in_rounds, trial_of, window_of
from gossamer.controllers.auto_choice import (
    CLEARLY,
    LEAST,
    Timing,
    WindowMedian,
    beyond_bytes,
    costs_of,
    differs,
    holds,
    is_clear,
    mean_losses,
    order,
    predicted,
    ready_by_share,
    rises,
    say_choice,
    say_dense,
    say_measured,
    timing_of,
)
from gossamer.controllers.auto_replay import DENSE, head
from gossamer.controllers.auto_state import ON_DENSE, AutoState, Trials
from gossamer.controllers.auto_table import ERRORS
from gossamer.core.bucket import State
from gossamer.core.contracts import CandidateCost, Facts, RankTimes

# Steps after which there are trials if dense is predicted to take four times as long. One compiles, candidates run beside the
# second, and the third is timed.
SOON = 3
QUICK = 4  # steps after which there are, if it is far slower; three are timed
MEASURING = 15  # steps where it is not, with those four: three that compile, then twelve
LOOKED_AT = 12  # of them
UNDISTURBED = 6  # last steps of a window, in which blocks are timed and no candidate is run beside them
FEW = 2  # known steps of dense that suffice where it is far slower, or must only pay what is owed
GAINS = 0.75, 1 - 1 / CLEARLY  # what a step must be predicted to gain for a trial after so few
FIRST, EVERY = 20, 50  # steps of the first window after a choice, and of those after it
REST, TRIES = 200, 10  # steps between a choice and the next measuring, and how often there is one
WIDTH = len(CandidateCost._fields)
ELSEWHERE = "another world or machine"
HARMLESS = 0.1  # of a gradient's length, lost: a hundredth of its variance, which a batch's own noise hides
COST = 0.03  # of a run whose length is told, that trials may take more than dense


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


class AutoSearch:
    """One decision of `auto`: reads what it remembers from the state, and writes what follows.

    `phase` is missing while it measures; then 1 during trials, 2 once it has chosen. Numbers of candidates count from 0.
    """

    def __init__(self, options: AutoOptions, facts: Facts, state: State, recipe_of: Callable[[int], Any]) -> None:
        self.options, self.facts, self.kept, self.recipe_of = options, facts, AutoState(state), recipe_of
        self.number = self.kept.whole("choice", ON_DENSE)  # in force

    def begin(self) -> None:
        options, facts = self.options, self.facts
        self.kept.write("begun", 1)
        facts.tell(head(facts.shapes, facts.size))
        if options.is_too_short:
            facts.tell(
                f"auto: dense is kept: {options.steps} steps are no more than the {options.most} that measuring and trials may take"
            )

    def next(self) -> int:
        """The number of what is in force at the next step."""
        if self._is_spoilt():
            return self._bar("averages were not finite more often than under dense")
        if not self.facts.times or not self.facts.finite:
            return self.number
        match self.kept.whole("phase"):
            case 0:
                return self._measured()
            case 1:
                return self._tried()
            case _:
                return self._watched()

    # -- measuring and trials ----------------------------------------------------------------------------------------

    def _measured(self) -> int:
        """The first trial, or dense. On a slow network, where a dense step takes long, few of them tell enough for a trial."""
        times, options, looked = self.facts.times, self.options, self.kept.whole("looked")
        is_quick = looked < len(GAINS)
        sizes, schedules = self._sizes(), [self.recipe_of(number).schedule for number in range(len(options.allow))]
        seen = timing_of(times, FEW if looked else 1) if is_quick else timing_of(_last(times, UNDISTURBED))
        costs = in_rounds(costs_of(times), schedules)
        # A run that was resumed has lost what was measured before.
        lacks = "again" not in self.kept and not all(isfinite(cost.work) for cost in costs)
        if not is_quick:
            costs = beyond_bytes(costs, seen, sizes)
        guesses = predicted(seen, sizes, costs, cuts=self._cuts(sizes))
        hopes = self._as_seen(guesses)
        if is_quick and not order(hopes, max(GAINS[looked], options.gain), self._barred()):
            self.kept.count("looked")
            self._window(ON_DENSE, *((LOOKED_AT, MEASURING - QUICK) if looked else (QUICK - 1, QUICK - SOON)))
            return ON_DENSE
        if not seen.steps.known or lacks or not any(map(isfinite, guesses[1:])):
            return self._again()
        self.kept.write_all("before", mean_losses(times))
        self.kept.write_all("guesses", guesses)
        self.kept.write_all("costs", [number for cost in costs for number in cost])
        self.kept.write_all("place", self._place())
        self.kept.write("computing", seen.computing)
        self.kept.write("latency", seen.latency)
        self.kept.write_all("ready", seen.ready)
        self.kept.write_all("sizes", sizes)
        self.kept.write_all("dense", [*seen.steps, seen.waiting])
        best = order(hopes, options.gain, self._barred())[:2]
        if not best:
            return self._settle(ON_DENSE, seen.steps, say_dense(seen) + self._besides(seen))
        self.kept.write_all("best", best)
        self.kept.write_all("turns", [])
        self.kept.write_all("found", [])
        self.kept.write("phase", 1)
        return self._turn_of(best[0])

    def _as_seen(self, guesses: Sequence[float]) -> list[float]:
        """The same, but of what was in force when measuring began anew what its steps took then, since that was no guess."""
        if "left" not in self.kept:
            return [*guesses]
        number, middle = self.kept.all("left")
        return [middle if i == number + 1 else guess for i, guess in enumerate(guesses)]

    def _tried(self) -> int:
        """A trial has ended: the next one, or the choice."""
        if self._place() != self.kept.all("place"):
            return self._measure_anew(ELSEWHERE)
        seen = timing_of(_last(self.facts.times, TRIED), FEW if self.number == ON_DENSE else LEAST)
        if not seen.steps.known:
            return self._again()
        if self.number == ON_DENSE:
            self.kept.write_all("dense", [*self.kept.all("dense")[:-1], seen.waiting])
        self.kept.write_all("before", self.kept.all("before") + mean_losses(_last(self.facts.times, TRIED)))
        self.kept.write_all("found", [*self.kept.all("found"), *seen.steps])
        trials = Trials(self.kept)
        if self.number != ON_DENSE and len(trials.of(self.number)) == 1:
            clear = is_clear(seen.steps, trials.dense_before)
            if not clear or not self._stays_clear(seen, trials.dense_before) or not self.options.direct[self.number]:
                return self._turn_of(ON_DENSE, FEW if clear else TRIED)
        untried = [number for number in map(int, self.kept.all("best")) if number not in trials.turns]
        if untried and not self._is_dear(trials) and not self._is_far_behind(untried[0], trials):
            return self._turn_of(untried[0])
        return self._choose(trials, seen)

    def _stays_clear(self, seen: Timing, dense: WindowMedian) -> bool:
        """True if the trial was not clearly quicker than predicted. If it was, the network may be faster than when dense was timed:
        then true if dense would still be clearly slower, had its averages become shorter by the same factor.
        """
        guess, took, computing = (
            self.kept.all("guesses")[self.number + 1],
            seen.steps.middle,
            self.kept.number("computing"),
        )
        if CLEARLY * took >= guess:
            return True
        if took <= computing:
            return False
        faster = (guess - computing) / (took - computing)
        return is_clear(seen.steps, dense._replace(low=computing + (dense.low - computing) / faster))

    def _is_far_behind(self, number: int, trials: Trials) -> bool:
        """True if what is predicted for a candidate is clearly slower than what was tried."""
        return self.kept.all("guesses")[number + 1] > CLEARLY * trials.fastest

    def _is_dear(self, trials: Trials) -> bool:
        """True if trials so far took more time than dense would have, by their share of the run."""
        steps, dense = self.options.steps, trials.dense_before.middle
        turns = zip(trials.turns, trials.found)
        more = sum(max(f.middle - dense, 0.0) * trial_of(self.recipe_of(turn).schedule) for turn, f in turns)
        return steps is not None and more > COST * steps * dense

    def _choose(self, trials: Trials, seen: Timing) -> int:
        options, guesses, dense = self.options, self.kept.all("guesses"), trials.last_dense
        said = {number: say_measured(options.name_of(number), trials.last_of(number)) for number in trials.tried}
        good = [n for n in trials.tried if all(holds(f, trials.dense_beside(i), options.gain) for i, f in trials.of(n))]
        if not good:
            predictions = ", ".join(f"{options.name_of(n)} {1000 * guesses[n + 1]:.3g}" for n in trials.tried)
            waits = say_dense(seen._replace(steps=dense, waiting=self.kept.all("dense")[-1]))
            word = f"{waits}; {', '.join(said.values())} (predicted {predictions})"
            return self._settle(ON_DENSE, dense, word + self._besides(seen))
        best = min(good, key=lambda number: trials.last_of(number).middle)
        steps, guess = trials.last_of(best), guesses[best + 1]
        if len(trials.of(best)) == 1 and differs(steps.middle, guess):  # once more, since the model has another opinion
            return self._turn_of(best)
        if not self._may_follow(best):
            return self._turn_of(best)
        others = "".join(f"; {text}" for number, text in said.items() if number != best)
        text = say_choice(options.name_of(best), self.facts.step + 1, steps, dense, guess)
        return self._settle(best, steps, text + others + self._besides(seen) + self._written(best))

    def _written(self, number: int) -> str:
        """The recipe that puts the same in force at the same step, if one can be written."""
        one, plain = self.recipe_of(number), self.recipe_of(ON_DENSE)
        if one.rules:
            return ""
        memory = "" if one.memory == plain.memory else f", {one.memory}"
        schedule = "" if one.schedule == plain.schedule else f", schedule={one.schedule}"
        made = self.facts.step - self.kept.whole("skipped")  # it counts no others
        first = "allreduce" if plain.ranks_per_node == 1 else plain.exchange
        size = "" if plain.bucket is None else f" + {plain.bucket}"
        return f"; as '{first} + switch_exchange({made}, {one.exchange}{memory}{schedule}){size}'"

    def _may_follow(self, number: int) -> bool:
        """True if this may come in force next; else dense must, in which what is owed is paid."""
        direct = self.options.direct
        return ON_DENSE in (number, self.number) or number == self.number or (direct[number] and direct[self.number])

    def _turn_of(self, number: int, rows: int = TRIED) -> int:
        if not self._may_follow(number):
            number, rows = ON_DENSE, FEW
        self.kept.write_all("turns", [*self.kept.all("turns"), number])
        self._window(number, rows, rows + 1)
        return self._adopt(number, tells=True)

    def _again(self) -> int:
        """The window's steps are not known: measure it once more, after which dense is kept."""
        if "again" not in self.kept:
            self.kept.write("again", 1)
            self._window(self.number, *(TRIED, TRIED + 1) if "phase" in self.kept else (LOOKED_AT, MEASURING))
            return self.number
        word = "auto: dense is kept: the clock of at least one rank gives no times that could be compared"
        return self._settle(ON_DENSE, WindowMedian(), word)

    def _settle(self, number: int, steps: WindowMedian, word: str) -> int:
        self.kept.forget("again", "judged", "left")
        self.kept.write("phase", 2)
        self.kept.write("expected", steps.middle)
        self.kept.write("since", self.facts.step)
        self.kept.write("off", 0)
        self.kept.write_all("after", [])
        self._window(number, *[EVERY if number == ON_DENSE else FIRST] * 2)
        names = ", ".join(self.options.allow)
        self.facts.tell(f"{word}. Allowed: {names}")
        return self._adopt(number, tells=number == ON_DENSE)

    def _besides(self, seen: Timing) -> str:
        """Names a slow rank, once."""
        if not seen.slow:
            return ""
        self.kept.write("named", 1)
        return f"; {seen.slow}, which no recipe changes"

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
        seen, lost = self.kept.whole(f"{own}seen", 0) + 1, self.kept.whole(f"{own}lost", 0) + (not self.facts.finite)
        self.kept.write(f"{own}seen", seen)
        self.kept.write(f"{own}lost", lost)
        dense_lost, dense_seen = self.kept.whole("dense_lost"), self.kept.whole("dense_seen")
        if not dense_lost:  # a few steps are not enough to know how seldom it loses one
            dense_seen = max(dense_seen, MEASURING)
        return not own and not self.facts.finite and lost >= 2 and lost * dense_seen > (dense_lost + 1) * seen

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


def _last(times: Sequence[RankTimes], rows: int) -> list[RankTimes]:
    """The same times, of the last rows only."""
    return [
        rank._replace(steps=rank.steps[-rows:], waits=rank.waits[-rows:], losses=rank.losses[-rows:]) for rank in times
    ]
