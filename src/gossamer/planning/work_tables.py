"""Work that was measured where a cluster is, and is kept in its file: a table for each recipe, and what a plan reads from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gossamer.core.errors import CostError
from gossamer.core.verbs import Verb
from gossamer.costs import Cluster, from_flags
from gossamer.costs.cluster import Device, WorkTable
from gossamer.planning.pieces import Programs
from gossamer.planning.timed_steps import TimedSteps
from gossamer.planning.work import WORLDS, MeasuredWork, MemoryPasses, NoWork, Planned, Work, WorkSource, beyond
from gossamer.recipe import Recipe

# One bucket of 6 MB, as most are; some recipes send the last layer apart.
BUCKET = {"first": (1500, 1000), "last": (10, 10)}


@dataclass
class _Seen(NoWork):
    """Notes the programs of a recipe in place of measuring them."""

    programs: list[Planned] = field(default_factory=list[Planned])

    def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
        self.programs.append(program)
        return super().of(program, size, verbs)


def measure_tables(recipes: Iterable[str], work: MeasuredWork, device: Device = "cpu") -> dict[str, WorkTable]:
    """A table for each recipe whose programs are not those of an earlier one. It runs on every rank of a host at once."""
    out, known = dict[str, WorkTable](), set[Any]()
    for name in recipes:
        recipe = Recipe.of(name)
        if (key := _key(recipe)) in known:
            continue
        known.add(key)
        programs = [_longest(recipe, size) for size in WORLDS]
        rows = [work.measured(program, size) for program, size in zip(programs, WORLDS, strict=True)]
        flat = tuple(tuple(x for piece in row for x in (piece.before, piece.inside)) for row in rows)
        out[name] = WorkTable(4 * programs[0].layout.numel, WORLDS, flat, device)
    return out


def _longest(recipe: Recipe, size: int) -> Planned:
    """The program of a recipe's longest bucket."""
    seen = _Seen()
    bound = recipe.bound(BUCKET)
    TimedSteps(Programs(bound, BUCKET, from_flags(nodes=size), seen))
    return max(seen.programs, key=lambda program: program.layout.numel)


def _key(recipe: Recipe) -> tuple[Any, ...]:
    """What programs of a recipe are alike in: who averages a bucket, or which schedule sends messages."""
    if recipe.schedule.shape.mixes:
        return "message", recipe.schedule
    return "average", recipe.exchange, recipe.memory


@dataclass
class WorkInFile:
    """Work from a cluster's tables; a program that none of them has is counted as passes over memory."""

    cluster: Cluster
    name: str = "in the file"
    lacks: bool = False  # a program that was asked for

    def __post_init__(self) -> None:
        self._tables = {_key(Recipe.of(name)): table for name, table in self.cluster.work.items()}
        self._passes = MemoryPasses(self.cluster.memory_rate)

    def for_another(self) -> "WorkInFile":
        """The same for another recipe, whose programs the file may have."""
        return replace(self, name=WorkInFile.name, lacks=False)

    def of(self, program: Planned, size: int, verbs: Sequence[Verb]) -> list[Work]:
        family = program.family[:2] if program.family[0] == "message" else program.family
        table = self._tables.get(family)
        if table is None:
            self.lacks = True
            self.name = "in the file; what it lacks as passes over memory, not measured"
            return self._passes.of(program, size, verbs)
        factor = 4 * program.layout.numel / table.bytes
        row = [factor * seconds for seconds in at_ranks(table, size)]
        found = [Work(before, inside) for before, inside in zip(row[::2], row[1::2], strict=True)]
        if len(found) == len(verbs) + 1:
            return found
        return [Work(sum(row) / (len(verbs) + 1), 0.0)] * (len(verbs) + 1)  # a tree has more levels among more ranks


def at_ranks(table: WorkTable, size: int) -> list[float]:
    """A row for this number of ranks, on a line through the two rows nearest to it; work that falls with ranks does not.

    >>> at_ranks(WorkTable(4, (2, 4), ((1.0, 0.0), (3.0, 0.0))), 8)
    [7.0, 0.0]
    >>> at_ranks(WorkTable(4, (4, 8), ((1.0, 0.0), (4.0, 0.0))), 2)
    [0.0, 0.0]
    """
    if size in table.ranks or len(table.ranks) == 1 or len({len(row) for row in table.seconds}) > 1:
        nearest = min(range(len(table.ranks)), key=lambda i: abs(table.ranks[i] - size))
        return list(table.seconds[nearest])
    upper = next((i for i, ranks in enumerate(table.ranks) if ranks > size and i), len(table.ranks) - 1)
    a, b = table.ranks[upper - 1 : upper + 1]
    pairs = zip(table.seconds[upper - 1], table.seconds[upper], strict=True)
    # Of fewer ranks than in any row, the line may fall below nothing.
    return [max(beyond((a, x), (b, y), size), 0.0) for x, y in pairs]


def work_of(cluster: Cluster) -> WorkSource:
    """Where the time of programs comes from: the file, or measured here; without a GPU here, that of GPUs is counted."""
    if not cluster.work and cluster.has_gpus:
        return MeasuredWork.on_gpu() if torch.cuda.is_available() else MemoryPasses(cluster.memory_rate)
    if not cluster.work:
        return MeasuredWork()
    if cluster.has_gpus and any(table.device == "cpu" for table in cluster.work.values()):
        raise CostError(
            "the cluster has GPUs, and the [work] tables of its file were measured on processors: measure on its GPUs with 'gossamer "
            "doctor --gpu --save', take the tables out, or plan with --work-of-this-machine"
        )
    for name in cluster.work:
        Recipe.of(name)  # a name that is no recipe is refused before anything is planned
    return WorkInFile(cluster)
