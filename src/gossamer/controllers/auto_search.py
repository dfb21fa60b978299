"""The search of `auto`: one decision at a time, from what ranks measured and what earlier decisions left in the state."""

from collections.abc import Sequence
from math import inf, isfinite

from gossamer.controllers.auto_candidates import TRIED, in_rounds, round_of, trial_of
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
    say_choice,
    say_dense,
    say_measured,
    timing_of,
)
from gossamer.controllers.auto_replay import head
from gossamer.controllers.auto_state import ON_DENSE, Trials
from gossamer.controllers.auto_watch import ELSEWHERE, EVERY, MEASURING, QUICK, SOON, AutoWatch
from gossamer.core.contracts import CandidateCost, RankTimes

LOOKED_AT = 12  # of the steps of MEASURING
UNDISTURBED = 6  # last steps of a window, in which blocks are timed and no candidate is run beside them
FEW = 2  # known steps of dense that suffice where it is far slower, or must only pay what is owed
GAINS = 0.5, 1 - 1 / CLEARLY  # what a step must be predicted to gain for a trial after so few
FIRST = 20  # steps of the first window after a choice
COST = 0.03  # of a run whose length is told, that trials may take more than dense


class AutoSearch(AutoWatch):
    """One decision of `auto`: of measuring, of trials, or of what is in force."""

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
        best = self._best_two(hopes, costs)
        if not best:
            return self._settle(ON_DENSE, seen.steps, say_dense(seen) + self._besides(seen))
        self.kept.write_all("best", best)
        self.kept.write_all("turns", [])
        self.kept.write_all("found", [])
        self.kept.write("phase", 1)
        return self._turn_of(best[0])

    def _best_two(self, hopes: Sequence[float], costs: Sequence[CandidateCost]) -> list[int]:
        """The candidates to try. Of two that are predicted nearly alike first the one that computes less: a prediction does not know
        who else needs the processor.
        """
        best = order(hopes, self.options.gain, self._barred())[:2]
        if len(best) == 2:
            first, second = best
            is_near = hopes[second + 1] * (1 - self.options.gain) <= hopes[first + 1]
            return [second, first] if is_near and costs[second].work < costs[first].work else best
        return best

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
        rows = self.kept.whole("rows")
        has_begun = self.number != ON_DENSE and rows in (FEW, LEAST)  # its first steps are over
        seen = timing_of(_last(self.facts.times, TRIED), FEW if has_begun or self.number == ON_DENSE else LEAST)
        if has_begun and not self._falls_behind(seen.steps.low):
            self._window(self.number, TRIED, TRIED - rows)
            return self.number
        if not seen.steps.known:
            return self._again()
        if self.number == ON_DENSE:
            self.kept.write_all("dense", [*self.kept.all("dense")[:-1], seen.waiting])
        self.kept.write_all("before", self.kept.all("before") + mean_losses(_last(self.facts.times, TRIED)))
        self.kept.write_all("found", [*self.kept.all("found"), *seen.steps])
        trials = Trials(self.kept)
        is_first = self.number != ON_DENSE and len(trials.of(self.number)) == 1
        if is_first and not has_begun and not trials.is_beaten(self.number):
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
        guess, took = self.kept.all("guesses")[self.number + 1], seen.steps.middle
        computing = self.kept.number("computing")
        if CLEARLY * took >= guess:
            return True
        if took <= computing:
            return False
        faster = (guess - computing) / (took - computing)
        return is_clear(seen.steps, dense._replace(low=computing + (dense.low - computing) / faster))

    def _is_far_behind(self, number: int, trials: Trials) -> bool:
        """True if what is predicted for a candidate is clearly slower than what was tried."""
        return self.kept.all("guesses")[number + 1] > CLEARLY * trials.fastest_beside(number)

    def _falls_behind(self, least: float) -> bool:
        """True if a trial whose steps all took at least so long is behind another one; or behind dense, so that it would cost too much
        in the end.
        """
        trials, taken = Trials(self.kept), WindowMedian(least, least, least)
        is_behind_dense = least > trials.dense_before.middle
        return least > trials.fastest_beside(self.number) or (is_behind_dense and self._is_dear(trials, taken))

    def _is_dear(self, trials: Trials, *under_way: WindowMedian) -> bool:
        """True if trials so far took more time than dense would have, by their share of the run."""
        steps, dense = self.options.steps, trials.dense_before.middle
        turns = zip(trials.turns, [*trials.found, *under_way])
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
        averages = not round_of(self.recipe_of(number).schedule)
        if number != ON_DENSE and averages:  # few at first, and the others if it does not fall behind
            is_second = Trials(self.kept).fastest_beside(number) < inf
            rows = LEAST if is_second else FEW if self.options.steps is not None else rows
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


def _last(times: Sequence[RankTimes], rows: int) -> list[RankTimes]:
    """The same times, of the last rows only."""
    return [
        rank._replace(steps=rank.steps[-rows:], waits=rank.waits[-rows:], losses=rank.losses[-rows:]) for rank in times
    ]
