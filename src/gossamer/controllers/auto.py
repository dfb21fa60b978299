"""auto: measure a run under dense averages, try what is allowed and promises to be faster, and keep what is."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, final
from zlib import crc32

from gossamer.controllers.auto_candidates import TRIED, default_for, keeps_nothing, names_rounds, round_of, trial_of
from gossamer.controllers.auto_replay import DENSE, RecordedRun, model_of, read_run
from gossamer.controllers.auto_search import FEW, UNDISTURBED, AutoSearch
from gossamer.controllers.auto_state import ON_DENSE
from gossamer.controllers.auto_table import ALLOWED
from gossamer.controllers.auto_watch import MEASURING, QUICK, SOON, AutoOptions
from gossamer.core.binding import Binding
from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Facts, TimesDue
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import part, require


@final
@part("auto")
class Auto(Controller):
    """Choose among `allow` and dense averages by measuring this run, and choose again when the network changes.

    The first steps are timed under dense averages, and each candidate is run thrice on a copy of the gradient. From these
    numbers, which all ranks exchange, a step is predicted for each: averages follow one another when their blocks are ready,
    and take the candidate's processor time, latencies, and share of dense's bytes. Unless one is predicted after step 3 to take
    half of dense's time, or two thirds after step 4, dense is timed until step 15, while ranks average the copy under each
    candidate, and if none is predicted to be `gain` faster, it stays. Else the best two train for eight steps each (the second
    for four, if all take longer than the first's did), and after each of them dense does, if it was not 1.5 times slower before
    than this one, or than a faster one. A candidate comes in force if its median of the slowest rank's steps is `gain` below
    dense's and the two intervals (of 90 %) part. All this takes 60 steps at most.

    Candidates may have rules, and rounds of local steps if their schedule is written out, as in "scatter(qsgd()) + local_sgd(8)":
    those train for five whole rounds.

    Every 50 steps the median is compared with that of the choice. If two in a row differ by over a quarter, and the numbers now
    say another order, it measures again: at least 200 steps after the last time, at most ten times. A rank that computes far
    longer than the others is named, and nothing changes for it.

    It goes back to dense for good, with a warning, if averages are not finite more often than under dense, if the compression
    error is over twice that of the table and over .1, or if the mean loss of 50 steps (`comm.log(loss=)`) lies above its trend before by
    twice its noise. These catch accidents, not a slightly worse model: the list is what protects quality.

    `steps` is the length of the run, if known: trials end when they cost 3 % of it. `replay` is a ledger that
    `comm.ledger.write(path)` has made: the same changes at the same steps, and no measuring.

    Use: where nobody wants to choose.

    Not for: runs of fewer than a few hundred steps; results that must be the same in every run, unless by `replay`.

    Wire: 24 bytes a step of a window from every rank at its end, and 16 for each block; four bytes five times at six steps.
    Where the network is fast, three averages of the largest block under each candidate, once.

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
    def read_hash(self) -> str:
        return "" if self.recorded is None else f"{crc32(repr(self.recorded).encode()):08x}"

    @property
    def hears_rate(self) -> bool:
        return False

    @property
    def hears_times(self) -> bool:
        return True

    @property
    def moves_schedule(self) -> bool:
        return self._names_rounds

    @cached_property
    def _names_rounds(self) -> bool:
        return names_rounds(self.allow)

    def bound(self, shapes: Mapping[str, tuple[int, ...]]) -> "Auto":
        allow = default_for(shapes) if self.allow == ALLOWED else self.allow
        return self if allow == self.allow else replace(self, allow=allow)

    def fits(self, binding: Binding) -> None:
        run = self.recorded
        if run is None:
            return
        if binding.size != run.size:
            raise AttachError(
                f"auto: {self.replay!r} is of a run of {run.size} ranks, and here are {binding.size}: start as many, or leave replay out"
            )
        shapes = binding.shapes or {s.name: s.shape for layout in binding.layouts for s in layout.segments}
        if (model := model_of(shapes)) != run.model:
            raise AttachError(
                f"auto: {self.replay!r} is of a run of another model (hash {run.model}, here {model}, of all "
                "trainable parameters' names and shapes): replay it on that model, or leave replay out"
            )

    def reach(self, recipe: Any) -> Iterable[Any]:
        found = [self._put(recipe, name) for name in (DENSE, *self.allow)]
        require(
            any(_in_force(one) == _in_force(recipe) for one in found) and not recipe.routes and recipe.update is None,
            f"{self} compares with plain dense averages at every step, and cannot begin with {recipe}: write 'auto' alone, and name "
            "what it may choose in allow",
        )
        names = [DENSE, *(name for _, name in sorted(self.recorded.changes.items()))] if self.recorded else []
        for before, after in pairwise(names):
            pair = self._put(recipe, before), self._put(recipe, after)
            require(
                DENSE in (before, after) or before == after or all(keeps_nothing(one, found[0]) for one in pair),
                f"auto: replay={self.replay!r} puts {before} and {after} in force one after the other, and auto returns to dense between "
                "the two, so that what one owes is paid: was the file changed by hand?",
            )
        return found

    def neighbours(self, recipe: Any, reached: Sequence[Any]) -> list[list[Any]]:
        dense, direct = reached[0], [one for one in reached if keeps_nothing(one, reached[0])]
        return [direct, *([dense, one] for one in (recipe, *reached) if one not in direct)]

    def _put(self, recipe: Any, name: str) -> Any:
        """The recipe with a candidate in force, in two levels where this one has them."""
        levels = f" + per_node({recipe.ranks_per_node})" if recipe.ranks_per_node > 1 else ""
        try:
            other = recipe.of(("allreduce" if name == DENSE else name) + levels)
        except RecipeError as error:
            raise RecipeError(f"auto: allow names {name!r}: {error}") from None
        plain, own = recipe.of("allreduce"), other.schedule.traits & {"own step", "accumulates"}
        require(
            (other.controller, other.update, other.bucket, other.routes) == (plain.controller, None, None, {})
            and not own,
            f"auto: allow names {name!r}, which is {other}: auto chooses among recipes without an update, a bucket(), a controller, a "
            "route(), or a step or batch of their own; leave it out, or train with it from the start",
        )
        require(
            other.schedule == plain.schedule or self._names_rounds,
            f"auto: allow names {name!r}, which does not average gradients at every step: rounds of local steps must be written out: "
            f"{str(other)!r}; gossip, quorums and overlap cannot be tried",
        )
        return replace(recipe, exchange=other.exchange, memory=other.memory, schedule=other.schedule, rules=other.rules)

    def due(self, step: int, recipe: Any, state: State) -> TimesDue:
        if self.replay is not None or _options(self, recipe.of).is_too_short:
            return TimesDue()
        until, rows = int(state.get("until", SOON)), int(state.get("rows", 1))
        runs = () if "phase" in state else self._runs(step - until, "looked" not in state)
        return TimesDue(
            rows=rows if step >= until else 0,
            times_blocks=step > until - UNDISTURBED * max(round_of(recipe.schedule), 1),
            measures_error=step == int(state.get("adopted", 0)) + 1 and int(state.get("choice", ON_DENSE)) != ON_DENSE,
            runs=runs,
            sends="looked" in state,
            candidates=[self._put(recipe, name) for name in self.allow] if runs or step >= until else (),
        )

    def _runs(self, place: int, is_quick: bool) -> Sequence[int]:
        """The candidates that are run so many steps before (negative) a window ends: all at once, or one in each step."""
        if is_quick:
            return range(len(self.allow)) if place == 1 - SOON else ()
        first = place + MEASURING - QUICK - 1
        return range(first, len(self.allow), UNDISTURBED - 1) if 0 <= first < UNDISTURBED - 1 else ()

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        if self.recorded is not None:
            name = self.recorded.changes.get(facts.step + 1)
            return recipe if name is None else self._put(recipe, name)
        options = _options(self, recipe.of)
        search = AutoSearch(options, facts, state, lambda number: self._put(recipe, options.name_of(number)))
        if not facts.finite:
            search.kept.count("skipped")
        if "begun" not in state:
            if facts.finite:
                search.begin()
            return self._put(recipe, DENSE)
        chosen = search.number if options.is_too_short else search.next()
        return recipe if chosen == search.number and not facts.times else search.recipe_of(chosen)


@cache
def _options(auto: Auto, of: Callable[[str], Any]) -> AutoOptions:
    """What this `auto` may do, whose texts `of` reads; asked for in each step."""
    longest = max(trial_of(of(text).schedule) for text in auto.allow)
    direct = tuple(keeps_nothing(of(text), of("allreduce")) for text in auto.allow)
    # Two candidates in turns with dense, and one of them once more; then dense, if the other is chosen.
    most = MEASURING + 3 * longest + 2 * (TRIED + 1) + (0 if all(direct) else FEW + 1)
    return AutoOptions(auto.allow, direct, auto.gain, auto.steps, most)


def _in_force(recipe: Any) -> tuple[Any, ...]:
    """What a candidate sets; a rule's condition names the model's own parameters once training has begun."""
    return recipe.exchange, recipe.memory, recipe.schedule, [(rule.exchange, rule.memory) for rule in recipe.rules]
