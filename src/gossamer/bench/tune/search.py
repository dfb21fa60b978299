"""The search: every recipe gets as many trials, turn by turn, so that one cut short was fair as far as it came."""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from gossamer.bench.record import machine, versions
from gossamer.bench.tune.knobs import at_rate
from gossamer.bench.tune.points import Setting, settings
from gossamer.bench.tune.record import Candidate, Trial, Tuning
from gossamer.bench.tune.space import SearchOverride, Space, TuningError, check, space
from gossamer.bench.tune.training import Length, Result, parameters_of, run
from gossamer.bench.workloads import Workload, get
from gossamer.core.errors import GossamerError
from gossamer.core.text import shown
from gossamer.recipe import Recipe
from gossamer.runtime.optimizer_state import kept_by

OTHER_SEEDS = 10  # from the seed of the search to the first of those on which the best are judged
LARGE = 100_000  # parameters of a model that is not left to lie about
Tell = Callable[[Tuning, Trial], None]


@dataclass(frozen=True)
class SearchPlan:
    """What is searched, and how long."""

    recipes: Mapping[str, str]  # by name; the first is the baseline
    workload: str = "lm"
    shards: str = "iid"
    trials: int = 8  # of each recipe
    ranks: int = 4
    steps: int = 48
    budget: int | None = None
    repeats: int = 3
    seed: int = 0
    wishes: Sequence[SearchOverride] = ()


class Search:
    """Plans all trials before the first, and runs those that a record does not have yet."""

    def __init__(self, question: SearchPlan, command: str = "") -> None:
        self.question = question
        self._workloads = dict[int, Workload]()
        self.workload = self._seeded(question.seed)
        model = self.workload.model()
        self.parameters = parameters_of(model)
        self.length = Length(question.steps, question.budget, kept_by(self.workload.optimizer(model)))
        self.plans = self._plan({name: Recipe.of(text) for name, text in question.recipes.items()})
        self.tuning = self._empty(command)

    def _seeded(self, seed: int) -> Workload:
        """The workload with this seed, whose data is loaded once."""
        if seed not in self._workloads:
            self._workloads[seed] = get(self.question.workload, seed=seed, shards=self.question.shards)
        return self._workloads[seed]

    def _plan(self, recipes: Mapping[str, Recipe]) -> dict[str, tuple[Space, list[Setting]]]:
        q = self.question
        check(q.wishes, [*recipes.values()])
        plans = dict[str, tuple[Space, list[Setting]]]()
        for name, recipe in recipes.items():
            found = space(recipe, q.wishes, self.parameters, q.ranks, q.budget is not None)
            plans[name] = found, settings(found, q.trials, q.seed)
            if not self.length.of(recipe, self.parameters, q.ranks):
                raise TuningError(f"{name}: a budget of {q.budget} bytes does not pay for one step; give more")
        return plans

    def _empty(self, command: str) -> Tuning:
        q, model = self.question, self.workload.model()
        return Tuning(
            command=command,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            workload=q.workload,
            shards=q.shards,
            summary=self.workload.summary,
            metric=self.workload.metric,
            lower_is_better=self.workload.lower_is_better,
            parameters=sum(p.numel() for p in model.parameters()),
            rates=[group["lr"] for group in self.workload.optimizer(model).param_groups],
            ranks=q.ranks,
            steps=q.steps,
            budget=q.budget,
            trials_each=q.trials,
            seeds=[q.seed + OTHER_SEEDS + i for i in range(q.repeats)],
            seed=q.seed,
            contenders=[
                Candidate(name, repr(found.recipe), {k.name: str(k.values) for k in found.knobs}, found.held)
                for name, (found, _) in self.plans.items()
            ],
            versions=versions(),
            machine=machine(),
        )

    def resume(self, earlier: Tuning) -> None:
        """Take over the trials of an earlier search, which asked the same; only `trials` and `repeats` may have grown."""
        of_workload = ("workload", "metric", "parameters", "rates", "shards")  # one's own may have been edited since
        for name in (*of_workload, "ranks", "steps", "budget", "seed", "contenders"):
            mine, theirs = getattr(self.tuning, name), getattr(earlier, name)
            if mine != theirs:
                raise TuningError(
                    f"the record there has other {name}: {_told(theirs)}, and now {_told(mine)} is asked for; "
                    "resume with what it was begun with, or give another folder"
                )
        for name in ("trials_each", "seeds"):
            mine, theirs = getattr(self.tuning, name), getattr(earlier, name)
            if (len(mine) < len(theirs)) if isinstance(mine, list) else mine < theirs:
                raise TuningError("the record there was asked for more trials or repeats: ask for as many, or more")
        self.tuning.trials, self.tuning.untrained = earlier.trials, earlier.untrained
        self.tuning.command = "\n".join(dict.fromkeys([*earlier.command.splitlines(), self.tuning.command]))
        each = {n: [*earlier.versions.get(n, v).split(", "), v] for n, v in self.tuning.versions.items()}
        all_of_them = earlier.versions | {name: ", ".join(dict.fromkeys(some)) for name, some in each.items()}
        self.tuning.created, self.tuning.versions = earlier.created, all_of_them

    def run(self, tell: Tell) -> None:
        """All trials that are missing; `tell` hears of each when it is over, and may keep what there is."""
        for number in range(self.question.trials):
            for name, (_, plan) in self.plans.items():
                if self.tuning.find(name, number) is None:
                    self._try(name, number, plan[number], self.question.seed, tell)
        for seed in self.tuning.seeds:
            for name, (_, plan) in self.plans.items():
                best = self.tuning.best(name)
                if best is not None and seed not in self.tuning.judged(best):
                    self._try(name, -1, plan[best.number], seed, tell)

    def _try(self, name: str, number: int, setting: Setting, seed: int, tell: Tell) -> None:
        workload = self._seeded(seed)
        untrained = self._untrained(workload)
        if sum(p.numel() for p in self.parameters.values()) > LARGE:
            gc.collect()  # ranks of earlier trials refer to each other: seventy of them took 9 GB
        began = perf_counter()
        result = self._result(workload, setting, first=number == 0)
        learned = math.isfinite(result.quality) and self.tuning.sign() * (result.quality - untrained) < 0
        why = "" if learned else result.error or "no better than before the first step"
        trial = Trial(
            contender=name,
            number=number,
            seed=seed,
            recipe=repr(at_rate(setting.recipe, setting.lr)[0]),
            lr=setting.lr,
            values={k: str(v) for k, v in setting.values.items()},
            outcome="ok" if learned else "diverged" if result.steps else "refused",
            steps=result.steps,
            quality=result.quality,
            loss=result.loss,
            sent=result.sent,
            seconds=perf_counter() - began,
            error=why,
        )
        self.tuning.trials.append(trial)
        tell(self.tuning, trial)

    def _result(self, workload: Workload, setting: Setting, first: bool) -> Result:
        """Values that this model or so few ranks do not bear cost their trial; a recipe as it was given, the search."""
        try:
            steps = self.length.of(setting.recipe, self.parameters, self.question.ranks)
            if not steps:
                return Result(0, math.nan, math.nan, 0, "the budget does not pay for one step")
            return run(workload, setting.recipe, setting.lr, steps, self.question.ranks)
        except GossamerError as error:
            if first:
                raise
            return Result(0, math.nan, math.nan, 0, str(error))

    def _untrained(self, workload: Workload) -> float:
        """What an untrained model of this seed is worth: who ends no better has diverged."""
        key = str(workload.seed)
        if key not in self.tuning.untrained:
            self.tuning.untrained[key] = workload.evaluate(workload.model())
        return self.tuning.untrained[key]


def _told(value: Any) -> str:
    if isinstance(value, list):
        return shown([v.recipe if isinstance(v, Candidate) else v for v in value])
    return shown(value)
