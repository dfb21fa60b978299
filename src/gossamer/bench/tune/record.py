"""What a search leaves behind: one JSON file that `tune` writes after every trial, and `report` reads."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gossamer.bench import record
from gossamer.core import files

KIND = "tuning"
FORMAT = 1

Outcome = Literal["ok", "diverged", "refused"]  # by the model, the ranks or the budget


@dataclass
class Trial:
    """One recipe, at one learning rate, trained once."""

    contender: str
    number: int  # from 0, the recipe as it was given; -1 where the best was judged again, on another seed
    seed: int
    recipe: str  # with its knobs; the rate of every_step() is the learning rate's multiple too
    lr: float  # in multiples of the workload's own
    values: dict[str, str]  # of the knobs, as a recipe writes them
    outcome: Outcome
    steps: int
    quality: float  # on held-out data
    loss: float  # of training, over the last steps
    sent: int  # bytes of one rank
    seconds: float  # that the trial took here, by the clock: no property of the recipe
    error: str = ""


@dataclass
class Candidate:
    """A recipe and its knobs."""

    name: str
    recipe: str
    knobs: dict[str, str]  # what is searched, and over which values
    held: dict[str, str] = field(default_factory=dict)  # what is not, and why


@dataclass
class Tuning:
    """Several recipes, searched with the same budget."""

    command: str
    created: str  # ISO 8601, UTC
    workload: str
    shards: str
    summary: str
    metric: str
    lower_is_better: bool
    parameters: int
    rates: list[float]  # the workload's own learning rates
    ranks: int
    steps: int
    budget: int | None  # bytes that a rank may send in one trial
    trials_each: int
    seeds: list[int]  # on which the best of each is judged again
    seed: int  # of the search
    contenders: list[Candidate]  # the first is the baseline
    untrained: dict[str, float] = field(default_factory=dict)  # quality before the first step, by seed
    trials: list[Trial] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    kind: str = KIND
    format: int = FORMAT

    def searched(self, name: str) -> list[Trial]:
        """The trials of a search, in the order in which they were drawn."""
        return sorted((t for t in self.trials if t.contender == name and t.number >= 0), key=lambda t: t.number)

    def find(self, name: str, number: int) -> Trial | None:
        return next((t for t in self.searched(name) if t.number == number), None)

    def judged(self, best: Trial) -> dict[int, Trial]:
        """The same settings on other seeds, by seed. What was judged when another trial was the best is not among them."""
        again = (t for t in self.trials if t.number < 0 and t.contender == best.contender)
        return {t.seed: t for t in again if (t.recipe, t.lr) == (best.recipe, best.lr) and t.seed in self.seeds}

    def sign(self) -> int:
        return 1 if self.lower_is_better else -1

    def best(self, name: str) -> Trial | None:
        """The best of a search; of equals the first."""
        ok = [t for t in self.searched(name) if t.outcome == "ok"]
        return min(ok, key=lambda t: self.sign() * t.quality, default=None)

    @property
    def complete(self) -> bool:
        bests = [self.best(c.name) for c in self.contenders]
        all_tried = all(len(self.searched(c.name)) >= self.trials_each for c in self.contenders)
        return all_tried and all(b is None or len(self.judged(b)) == len(self.seeds) for b in bests)

    def write(self, path: Path) -> None:
        """Over nothing but an earlier record; all of it or nothing."""
        files.write(path, json.dumps(record.AUTHOR | record.finite(asdict(self)), allow_nan=False), record.RECORD)

    @staticmethod
    def read(path: Path) -> "Tuning":
        """A ValueError says, in words about the file, why it holds no record of a search."""
        return record.read(path, of_table)


def of_table(table: Any) -> Tuning:
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise ValueError("it is of no search: 'gossamer tune' writes those")
    if table.get("format") != FORMAT:
        raise ValueError(f"it has format {table.get('format')!r}, and this version of gossamer reads format {FORMAT}")
    facts: dict[str, Any] = {k: v for k, v in table.items() if k not in record.AUTHOR}
    facts["contenders"] = [record.made(Candidate, c) for c in facts["contenders"]]
    facts["trials"] = [record.made(Trial, t | _numbers(t, "quality", "loss", "seconds")) for t in facts["trials"]]
    facts["untrained"] = _numbers(facts["untrained"], *facts["untrained"])
    return record.made(Tuning, facts)


def is_tuning(path: Path) -> bool:
    """Whether a file is the record of a search; one that cannot be read is not."""
    try:
        return record.read(path, lambda table: table.get("kind")) == KIND
    except (OSError, ValueError):
        return False


def _numbers(table: dict[str, Any], *names: str) -> dict[str, float]:
    return {name: record.number(table[name]) for name in names}
