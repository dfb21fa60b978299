"""auto: measure a run under dense averages, try what is allowed and promises to be faster, and keep what is."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from math import isfinite
from typing import Any, final

import torch

from gossamer.controllers.auto_choice import (
    Timing,
    WindowMedian,
    costs_of,
    differs,
    holds,
    mean_losses,
    order,
    predicted,
    rises,
    say_choice,
    say_dense,
    say_measured,
    timing_of,
)
from gossamer.controllers.auto_replay import DENSE, RecordedRun, head, model_of, read_run
from gossamer.controllers.auto_table import ALLOWED, ERRORS
from gossamer.core.binding import Binding
from gossamer.core.bucket import State
from gossamer.core.contracts import CandidateCost, Controller, Facts, RankTimes, TimesDue
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import part, require

MEASURING = 15  # steps: three that compile, then twelve
LOOKED_AT = 12  # of them
TRIED = 8  # steps of a trial, after one that warms up
UNDISTURBED = 6  # last steps of a window, in which blocks are timed and no candidate is run beside them
MOST = 60  # steps of measuring and trials
FIRST, EVERY = 20, 50  # steps of the first window after a choice, and of those after it
REST, TRIES = 200, 10  # steps between a choice and the next measuring, and how often there is one
COST = 0.03  # of a run whose length is told, that trials may take more than dense
ON_DENSE = -1  # the number of dense among candidates


@final
@part("auto")
class Auto(Controller):
    """Choose among `allow` and dense averages by measuring this run, and choose again when the network changes.

    Steps 4 to 15 are timed under dense averages, and each candidate is run a few times on a copy of the gradient. From these
    numbers, which all ranks exchange, a step is predicted for each: averages follow one another when their blocks are ready, and
    take the candidate's processor time, latencies, and share of dense's bytes. If none is predicted to be `gain` faster than dense,
    dense stays. Else the best two train for eight steps each, in turns with eight dense ones. One comes in force if its median of
    the slowest rank's steps is `gain` below dense's and the two intervals (of 90 %) part. All this takes 60 steps at most.

    Every 50 steps the median is compared with that of the choice. If two in a row differ by over a quarter, and the numbers now
    say another order, it measures again: at least 200 steps after the last time, at most ten times. A rank that computes far
    longer than the others is named, and nothing changes for it.

    It goes back to dense for good, with a warning, if averages are not finite more often than under dense, if the compression
    error is over twice that of the table, or if the mean loss of 50 steps (`comm.log(loss=)`) lies above its trend before by
    twice its noise. These catch accidents, not a slightly worse model: the list is what protects quality.

    `steps` is the length of the run, if known: trials end when they cost 3 % of it. `replay` is a ledger that
    `comm.ledger.write(path)` has made: the same changes at the same steps, and no measuring.

    Use: where nobody wants to choose.

    Not for: runs of fewer than a few hundred steps; results that must be the same in every run, unless by `replay`.

    Wire: 24 bytes a step of a window from every rank at its end, and 16 for each block; four bytes at five steps.

    >>> Auto(allow=("bf16", "qsgd"), gain=0.2)
    auto(allow=('bf16', 'qsgd'), gain=0.2)

    Paper: none.
    """

    allow: tuple[str, ...] = ALLOWED
    gain: float = 0.1
    steps: int | None = None
    replay: str | None = None

    def __post_init__(self) -> None:
        require(
            len(self.allow) > 0,
            "auto: allow is empty, so there is nothing to choose from: name recipes, or use allreduce",
        )
        require(
            0 <= self.gain < 1,
            f"auto: gain must lie in [0, 1), got {self.gain}; 0.1 asks for a step shorter by a tenth",
        )
        require(self.steps is None or self.steps >= 1, f"auto: steps must be at least 1, got {self.steps}")
        if self.replay is not None:
            _ = self.recorded

    @cached_property
    def recorded(self) -> RecordedRun | None:
        """The run that is replayed."""
        return None if self.replay is None else read_run(self.replay, self.allow)

    @property
    def hears_rate(self) -> bool:
        return False

    @property
    def hears_times(self) -> bool:
        return True

    @property
    def is_too_short(self) -> bool:
        """True if the run would end before a choice could pay."""
        return self.steps is not None and self.steps <= MOST

    def fits(self, binding: Binding) -> None:
        run = self.recorded
        if run is None:
            return
        if binding.size != run.size:
            raise AttachError(
                f"auto: {self.replay!r} is of a run of {run.size} ranks, and here are {binding.size}: start as many, or leave replay out"
            )
        if model_of(binding.layouts) != run.model:
            raise AttachError(
                f"auto: {self.replay!r} is of a run of another model (hash {run.model}, here {model_of(binding.layouts)}, of all "
                "trainable parameters' names and shapes): replay it on that model, or leave replay out"
            )

    def reach(self, recipe: Any) -> Iterable[Any]:
        found = [self._put(recipe, name) for name in (DENSE, *self.allow)]
        require(
            any((one.exchange, one.memory) == (recipe.exchange, recipe.memory) for one in found)
            and not recipe.rules
            and not recipe.routes
            and recipe.update is None
            and recipe.schedule == recipe.of("allreduce").schedule,
            f"{self} compares with plain dense averages at every step, and cannot begin with {recipe}: write 'auto' alone, and name "
            "what it may choose in allow",
        )
        return found

    def _put(self, recipe: Any, name: str) -> Any:
        """The recipe with a candidate in force, in two levels where this one has them."""
        levels = f" + per_node({recipe.ranks_per_node})" if recipe.ranks_per_node > 1 else ""
        try:
            other = recipe.of(("allreduce" if name == DENSE else name) + levels)
        except RecipeError as error:
            raise RecipeError(f"auto: allow names {name!r}: {error}") from None
        plain = recipe.of("allreduce")
        require(
            (other.schedule, other.controller, other.update, other.rules, other.bucket)
            == (plain.schedule, plain.controller, None, (), None),
            f"auto: allow names {name!r}, which is {other}: auto chooses among recipes that average gradients at every step, without "
            "rules, an update, a bucket() or a controller of their own; leave it out, or train with it from the start",
        )
        return replace(recipe, exchange=other.exchange, memory=other.memory)

    def due(self, step: int, recipe: Any, state: State) -> TimesDue:
        if self.replay is not None or self.is_too_short:
            return TimesDue()
        until, rows = int(state.get("until", MEASURING)), int(state.get("rows", LOOKED_AT))
        runs, place = (), step - (until - MEASURING) - 3
        if "phase" not in state and 1 <= place < UNDISTURBED:
            runs = range(place - 1, len(self.allow), UNDISTURBED - 1)
        return TimesDue(
            rows=rows if step >= until else 0,
            times_blocks=step > until - UNDISTURBED,
            measures_error=step == int(state.get("adopted", 0)) + 1 and int(state.get("choice", ON_DENSE)) != ON_DENSE,
            runs=runs,
            candidates=[self._put(recipe, name) for name in self.allow] if runs or step >= until else (),
        )

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        if self.recorded is not None:
            name = self.recorded.changes.get(facts.step + 1)
            return recipe if name is None else self._put(recipe, name)
        search = AutoSearch(self, facts, state, lambda number: self._put(recipe, self.name_of(number)))
        if "begun" not in state:
            if facts.finite:
                search.begin()
            return self._put(recipe, DENSE)
        chosen = search.number if self.is_too_short else search.next()
        return recipe if chosen == search.number and not facts.times else search.recipe_of(chosen)

    def name_of(self, number: int) -> str:
        return DENSE if number == ON_DENSE else self.allow[number]


class AutoSearch:
    """One decision of `auto`: reads what it remembers from the state, and writes what follows.

    `phase` is missing while it measures; then 1 during trials, 2 once it has chosen. Numbers of candidates count from 0.
    """

    def __init__(self, auto: Auto, facts: Facts, state: State, recipe_of: Callable[[int], Any]) -> None:
        self.auto, self.facts, self.state, self.recipe_of = auto, facts, state, recipe_of
        self.number = self._whole("choice", ON_DENSE)  # in force

    def begin(self) -> None:
        auto, facts = self.auto, self.facts
        self._keep("begun", 1)
        facts.tell(head([block.layout for block in facts.blocks], facts.size))
        if auto.is_too_short:
            facts.tell(
                f"auto: dense is kept: {auto.steps} steps are no more than the {MOST} that measuring and trials may take"
            )

    def next(self) -> int:
        """The number of what is in force at the next step."""
        if self._is_spoilt():
            return self._bar("averages were not finite more often than under dense")
        if not self.facts.times or not self.facts.finite:
            return self.number
        match self._whole("phase", 0):
            case 0:
                return self._measured()
            case 1:
                return self._tried()
            case _:
                return self._watched()

    # -- measuring and trials ----------------------------------------------------------------------------------------

    def _measured(self) -> int:
        times, auto = self.facts.times, self.auto
        seen, costs = timing_of(_last(times, UNDISTURBED)), costs_of(times)
        guesses = predicted(seen, self._sizes(), costs)
        if not seen.steps.known or not any(map(isfinite, guesses[1:])):
            return self._again()
        self._keep_all("before", mean_losses(times))
        self._keep_all("guesses", guesses)
        self._keep_all("costs", [number for cost in costs for number in cost])
        self._keep_all("place", self._place())
        self._keep("computing", seen.computing)
        self._keep_all("dense", [*seen.steps, seen.waiting])
        best = order(guesses, auto.gain, self._barred())[:2]
        if not best:
            return self._settle(ON_DENSE, seen.steps, say_dense(seen) + self._besides(seen))
        self._keep_all("turns", [turn for number in best for turn in (number, ON_DENSE)])
        self._keep_all("found", [])
        self._keep("phase", 1)
        return self._try(best[0])

    def _tried(self) -> int:
        """A trial has ended: the next one, or the choice."""
        seen = timing_of(_last(self.facts.times, TRIED))
        if not seen.steps.known:
            return self._again()
        self._keep_all("before", self._all("before") + mean_losses(_last(self.facts.times, TRIED)))
        self._keep_all("found", [*self._all("found"), *seen.steps])
        turns, found = self._turns(), self._found()
        if len(found) < len(turns) and not (turns[len(found)] != ON_DENSE and self._is_dear()):
            return self._try(turns[len(found)])
        return self._choose(turns[: len(found)], found, seen)

    def _choose(self, turns: Sequence[int], found: Sequence[WindowMedian], seen: Timing) -> int:
        auto, guesses = self.auto, self._all("guesses")
        dense = next((f for turn, f in zip(reversed(turns), reversed(found)) if turn == ON_DENSE), found[-1])
        tried = {n for n in turns if n != ON_DENSE}
        good = [n for n in tried if all(holds(f, self._dense_beside(i), auto.gain) for i, f in self._of(n))]
        word = ", ".join(say_measured(auto.name_of(n), f) for n in sorted(tried) for _, f in self._of(n)[-1:])
        if not good:
            predictions = ", ".join(f"{auto.name_of(n)} {1000 * guesses[n + 1]:.3g}" for n in sorted(tried))
            waits = say_dense(seen._replace(steps=dense, waiting=self._all("dense")[-1]))
            return self._settle(ON_DENSE, dense, f"{waits}; {word} (predicted {predictions})" + self._besides(seen))
        best = min(good, key=lambda n: self._of(n)[-1][1].middle)
        mine = self._of(best)
        steps, guess = mine[-1][1], guesses[best + 1]
        if len(mine) == 1 and differs(steps.middle, guess):  # measured once more, since the model has another opinion
            self._keep_all("turns", [*turns, best])
            return self._try(best)
        others = "".join(f"; {say_measured(auto.name_of(n), self._of(n)[-1][1])}" for n in sorted(tried - {best}))
        text = say_choice(auto.name_of(best), self.facts.step + 1, steps, dense, guess)
        return self._settle(best, steps, text + others + self._besides(seen) + self._written(best))

    def _written(self, number: int) -> str:
        """The recipe that puts the same in force at the same step."""
        one = self.recipe_of(number)
        memory = "" if one.memory == self.recipe_of(ON_DENSE).memory else f", {one.memory}"
        return f"; as 'allreduce + switch_exchange({self.facts.step}, {one.exchange}{memory})'"

    def _of(self, number: int) -> list[tuple[int, WindowMedian]]:
        """The trials of a candidate, with their places in turn."""
        return [(i, f) for i, (turn, f) in enumerate(zip(self._turns(), self._found())) if turn == number]

    def _dense_beside(self, place: int) -> WindowMedian:
        """The dense turn after a trial, or the last one before it."""
        turns, found = self._turns(), self._found()
        dense = [i for i in range(len(found)) if turns[i] == ON_DENSE]
        after = [i for i in dense if i > place]
        return found[after[0] if after else dense[-1]] if dense else WindowMedian(*self._all("dense")[:3])

    def _try(self, number: int) -> int:
        self._window(TRIED, TRIED + 1)
        return self._adopt(number, tells=True)

    def _is_dear(self) -> bool:
        """True if trials so far took more time than dense would have, by their share of the run."""
        steps, dense = self.auto.steps, self._all("dense")[1]
        more = sum(max(f.middle - dense, 0.0) * (TRIED + 1) for f in self._found())
        return steps is not None and more > COST * steps * dense

    def _again(self) -> int:
        """The window's steps are not known: measure it once more, after which dense is kept."""
        if "again" not in self.state:
            self._keep("again", 1)
            self._window(*(TRIED, TRIED + 1) if "phase" in self.state else (LOOKED_AT, MEASURING))
            return self.number
        word = "auto: dense is kept: the clock of at least one rank gives no times that could be compared"
        return self._settle(ON_DENSE, WindowMedian(), word)

    def _settle(self, number: int, steps: WindowMedian, word: str) -> int:
        self.state.pop("again", None)
        self._keep("phase", 2)
        self._keep("expected", steps.middle)
        self._keep("since", self.facts.step)
        self._keep("off", 0)
        self._keep_all("after", [])
        self._window(*[EVERY if number == ON_DENSE else FIRST] * 2)
        names = ", ".join(self.auto.allow)
        self.facts.tell(f"{word}. Allowed: {names}")
        return self._adopt(number, tells=number == ON_DENSE)

    def _besides(self, seen: Timing) -> str:
        return f"; {seen.slow}, which no recipe changes" if seen.slow else ""

    # -- going on ----------------------------------------------------------------------------------------------------

    def _watched(self) -> int:
        times = self.facts.times
        seen = timing_of(times)
        self._window(EVERY, EVERY)
        if self.number != ON_DENSE and (reason := self._harm(times)):
            return self._bar(reason)
        if self._all("place") and self._place() != self._all("place"):
            return self._measure_anew("another world or machine")
        if not seen.steps.known or not self._all("costs"):
            return self.number
        if seen.slow and "named" not in self.state:
            self._keep("named", 1)
            self.facts.tell(f"auto: nothing changes because {seen.slow}: that is not the network")
        wanted = next(iter(order(self._predicted(seen), self.auto.gain, self._barred())), ON_DENSE)
        is_off = differs(seen.steps.middle, float(self.state["expected"])) and wanted != self.number
        off = self._whole("off", 0) + 1 if is_off else 0
        self._keep("off", off)
        rested = self.facts.step - self._whole("since", 0) >= REST and self._whole("tries", 0) < TRIES
        return self._measure_anew("other times") if off >= 2 and rested else self.number

    def _predicted(self, seen: Timing) -> list[float]:
        numbers = self._all("costs")
        costs = [CandidateCost(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]
        late = max(seen.computing - float(self.state["computing"]), 0.0) if seen.slow else 0.0
        return predicted(seen, self._sizes(), costs, None if self.number == ON_DENSE else costs[self.number], late)

    def _harm(self, times: Sequence[RankTimes]) -> str:
        """Why what is in force should not be, if so."""
        name, error = self.auto.name_of(self.number), max(rank.error for rank in times)
        known = ERRORS.get(name)
        if known is not None and isfinite(error) and error > 2 * known:
            return f"its compression error is {error:.3g}, and over twice the {known:.3g} of the table"
        after = self._all("after")
        if len(after) < EVERY:
            after = [*after, *mean_losses(times)]
            self._keep_all("after", after)
            if len(after) >= EVERY and rises(self._all("before"), after[:EVERY]):
                return f"the loss of {EVERY} steps lies above its trend by more than its noise"
        return ""

    def _is_spoilt(self) -> bool:
        """Count averages that are not finite, and say if what is in force has more of them than dense had."""
        own = "" if self.number != ON_DENSE else "dense_"
        seen, lost = self._whole(f"{own}seen", 0) + 1, self._whole(f"{own}lost", 0) + (not self.facts.finite)
        self._keep(f"{own}seen", seen)
        self._keep(f"{own}lost", lost)
        dense_lost, dense_seen = self._whole("dense_lost", 0), self._whole("dense_seen", 0)
        return not own and not self.facts.finite and lost >= 2 and lost * dense_seen > (dense_lost + 1) * seen

    def _measure_anew(self, why: str) -> int:
        self._keep("tries", self._whole("tries", 0) + 1)
        del self.state["phase"]
        self._window(LOOKED_AT, MEASURING)
        self.facts.tell(f"auto measures again: {why}")
        return self._adopt(ON_DENSE, tells=True)

    def _bar(self, reason: str) -> int:
        """Back to dense for good."""
        step, name = self.facts.step + 1, self.auto.name_of(self.number)
        word = f"auto: dense from step {step} for good, after {name}: {reason}"
        warnings.warn(word, RuntimeWarning, stacklevel=2)
        self._keep_all("barred", [1.0] * len(self.auto.allow))
        self._keep("phase", 2)
        self._keep("tries", TRIES)
        self._keep("expected", float("nan"))
        self._window(EVERY, EVERY)
        self.facts.tell(word)
        return self._adopt(ON_DENSE, tells=False)

    # -- what it remembers -------------------------------------------------------------------------------------------

    def _adopt(self, number: int, tells: bool) -> int:
        if number != self.number:
            self._keep("choice", number)
            self._keep("adopted", self.facts.step)
            self._keep("seen", 0)
            self._keep("lost", 0)
            if tells:
                self.facts.tell(f"auto tries {self.auto.name_of(number)} from step {self.facts.step + 1}")
        return number

    def _window(self, rows: int, steps: int) -> None:
        """Look at `rows` steps, in so many steps from now."""
        self._keep("rows", rows)
        self._keep("until", self.facts.step + steps)

    def _whole(self, key: str, default: int) -> int:
        return int(self.state.get(key, default))

    def _keep(self, key: str, value: float) -> None:
        self.state[key] = torch.tensor(value, dtype=torch.float64, device="cpu")

    def _all(self, key: str) -> list[float]:
        found = self.state.get(key)
        return [] if found is None else found.tolist()

    def _keep_all(self, key: str, values: Sequence[float]) -> None:
        self.state[key] = torch.tensor([*values], dtype=torch.float64, device="cpu")

    def _turns(self) -> list[int]:
        return [int(turn) for turn in self._all("turns")]

    def _found(self) -> list[WindowMedian]:
        numbers = self._all("found")
        return [WindowMedian(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]

    def _barred(self) -> list[bool]:
        return [bool(each) for each in self._all("barred")] or [False] * len(self.auto.allow)

    def _sizes(self) -> list[int]:
        return [block.layout.numel for block in self.facts.blocks]

    def _place(self) -> list[float]:
        """The world and its machines."""
        return [float(self.facts.size), sum(rank.machine for rank in self.facts.times)]


def _last(times: Sequence[RankTimes], rows: int) -> list[RankTimes]:
    """The same times, of the last rows only."""
    return [
        rank._replace(steps=rank.steps[-rows:], waits=rank.waits[-rows:], losses=rank.losses[-rows:]) for rank in times
    ]
