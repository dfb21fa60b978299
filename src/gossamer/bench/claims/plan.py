"""The plan of a claim: which runs are made, with which settings and seeds. Its hash is fixed before the first of them.

A `ClaimStudy` runs a function of the claim's own for each case and seed: theory, bytes. A `Contest` trains recipes on a
workload, each tuned with as many trials by the search of `gossamer tune`; the first is the reference.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

from gossamer.bench.claims.evidence import ClaimRun, Key, Rows
from gossamer.bench.claims.training import ContestRun, constant, trained
from gossamer.bench.tune import Search, SearchPlan
from gossamer.bench.tune.points import Setting
from gossamer.bench.tune.space import SearchOverride
from gossamer.bench.workloads import get

JUDGED = (30, 31, 32, 33, 34)  # nobody has looked at them, and no default was chosen by them
DEAR = JUDGED[:3]  # where a run is dear
TUNING_SEED, FINAL_SEED = 0, 1
FINALISTS = 2
QUICK = 5  # `--quick` takes so many times fewer steps
Measure = Callable[..., Rows]  # (seed, **settings)


class PlannedRun(NamedTuple):
    """A run to be made, in any process."""

    key: Key
    call: Measure
    arguments: dict[str, Any]
    shown: dict[str, str]  # what the record says of its settings
    may_fail: bool = False  # values that a model does not bear cost their trial


@dataclass(frozen=True)
class ClaimStudy:
    """A function of the claim's own, run for each case and seed."""

    measure: Measure
    cases: Mapping[str, Mapping[str, Any]]
    quick: Mapping[str, Any] = field(default_factory=dict[str, Any])  # settings in their place under --quick
    seeds: tuple[int, ...] = JUDGED

    def tasks(self, name: str, done: Mapping[Key, ClaimRun]) -> list[PlannedRun]:
        """What is to be run now."""
        tasks = [self._task(name, case, seed) for seed in self.seeds for case in self.cases]
        return [task for task in tasks if task.key not in done]

    def _task(self, name: str, case: str, seed: int) -> PlannedRun:
        settings = dict(self.cases[case])
        shown = {k: str(v) for k, v in settings.items()}
        return PlannedRun((name, case, "judged", 0, seed), self.measure, {**settings, "seed": seed}, shown)

    def quickened(self) -> "ClaimStudy":
        """One tuning seed, and the settings of a quick look."""
        cases = {c: {**s, **{k: v for k, v in self.quick.items() if k in s}} for c, s in self.cases.items()}
        return replace(self, cases=cases, seeds=(TUNING_SEED,))


@dataclass(frozen=True)
class Contest:
    """Recipes that train one workload."""

    workload: str
    recipes: Mapping[str, str]  # by name; the first is the reference
    steps: int
    every: int  # steps between two judgements; the ends of rounds are best
    ranks: int = 4
    trials: int = 6  # of each; with one, each trains as it is given, at the workload's own rate
    tuned_steps: int = 0  # of a trial, if not as many
    shards: str = "iid"
    seeds: tuple[int, ...] = JUDGED
    knobs: tuple[str, ...] = ("lr=0.25..4",)  # as `gossamer tune --knob` reads them
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the workload
    rate: Callable[[float], float] = constant  # the factor of the learning rate, by the share of steps that are done

    def settings(self) -> dict[str, list[Setting]]:
        """The trials of each recipe, as the search plans them; loads the data."""
        get(self.workload, **self.options).prepare()
        wishes = [SearchOverride.of(k) for k in self.knobs]
        asked = SearchPlan(
            self.recipes, self.workload, self.shards, self.trials, self.ranks, self.steps, repeats=0, wishes=wishes
        )
        return {name: plan for name, (_, plan) in Search(asked).plans.items()}

    def tasks(self, name: str, done: Mapping[Key, ClaimRun]) -> list[PlannedRun]:
        """First all trials, then the two best of each on another seed, then the better one on the seeds that judge."""
        if all((name, case, "judged", seed) in {(k[0], k[1], k[2], k[4]) for k in done} for case, seed in self._ends()):
            return []
        plans = self.settings()
        for wanted in (self._trials(done, name), self._finals(done, name), self._judged(done, name)):
            tasks = [self._task((name, *key), plans[key[0]][key[2]]) for key in wanted if (name, *key) not in done]
            if tasks:
                return tasks
        return []

    def _ends(self) -> list[tuple[str, int]]:
        return [(case, seed) for case in self.recipes for seed in self.seeds]

    def _trials(self, done: Mapping[Key, ClaimRun], name: str) -> list[tuple[str, str, int, int]]:
        numbers = range(self.trials if self.trials > 1 else 0)
        return [(case, "tuning", number, TUNING_SEED) for number in numbers for case in self.recipes]

    def _finals(self, done: Mapping[Key, ClaimRun], name: str) -> list[tuple[str, str, int, int]]:
        if self.trials == 1:
            return []
        return [(c, "final", n, FINAL_SEED) for c in self.recipes for n in self._best(done, name, c)[:FINALISTS]]

    def _judged(self, done: Mapping[Key, ClaimRun], name: str) -> list[tuple[str, str, int, int]]:
        chosen = {case: self.chosen(done, name, case) for case in self.recipes}
        return [(case, "judged", chosen[case], seed) for seed in self.seeds for case in self.recipes]

    def _best(self, done: Mapping[Key, ClaimRun], name: str, case: str) -> list[int]:
        """The numbers of the trials, the best first; those that diverged are left out."""
        ends = {n: self._end(done, (name, case, "tuning", n, TUNING_SEED)) for n in range(self.trials)}
        return sorted((n for n in ends if math.isfinite(ends[n])), key=lambda n: ends[n])

    def chosen(self, done: Mapping[Key, ClaimRun], name: str, case: str) -> int:
        """Of the two best, the one whose worse end on two seeds is better; the recipe as given if none ended well."""
        if self.trials == 1:
            return 0
        found = dict[int, float]()
        for n in self._best(done, name, case)[:FINALISTS]:
            keys: list[Key] = [(name, case, "tuning", n, TUNING_SEED), (name, case, "final", n, FINAL_SEED)]
            ends = [self._end(done, key) for key in keys]
            if all(math.isfinite(e) for e in ends):
                found[n] = max(ends)
        return min(found, key=lambda n: found[n], default=0)

    def _end(self, done: Mapping[Key, ClaimRun], key: Key) -> float:
        """The last quality, less is better; not a number if it diverged."""
        run = done.get(key)
        if run is None or run.error or not run.rows.get("quality"):
            return math.nan
        return run.rows["quality"][-1] * (1 if get(self.workload).lower_is_better else -1)

    def _task(self, key: Key, setting: Setting) -> PlannedRun:
        steps = self.steps if key[2] == "judged" or not self.tuned_steps else self.tuned_steps
        options = {**self.options, "seed": key[4], "shards": self.shards}
        every = min(self.every, steps)
        run = ContestRun(self.workload, options, repr(setting.recipe), setting.lr, steps, every, self.ranks, self.rate)
        shown = {"recipe": repr(setting.recipe), "lr": f"{setting.lr:.6g}", "steps": str(steps)}
        return PlannedRun(key, trained, {"run": run}, shown, may_fail=key[3] > 0)

    def quickened(self) -> "Contest":
        """One seed, a fifth of the steps, and no search."""
        steps = max(self.steps // QUICK, 1)
        return replace(self, steps=steps, every=min(self.every, steps), trials=1, seeds=(TUNING_SEED,))


def plain(value: Any) -> Any:
    """A value as JSON has it: functions by their name, plans by their fields.

    >>> plain({"of": (1, plain)})
    {'of': [1, 'gossamer.bench.claims.plan.plain']}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else value


def plan_hash(plan: Mapping[str, ClaimStudy | Contest], rules: Mapping[str, str]) -> str:
    """Of all settings and of the rules that judge: a plan that changes in anything is another plan."""
    text = json.dumps({"plan": plain(plan), "rules": plain(rules)}, sort_keys=False)
    return blake2b(text.encode(), digest_size=8).hexdigest()
