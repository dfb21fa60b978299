"""Plans a training: seconds a step of recipes and of DDP on a cluster, and from which rate on a recipe pays."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, lcm

from gossamer.controllers.auto import DENSE, Auto
from gossamer.core.binding import Binding
from gossamer.core.bucket import Layout
from gossamer.core.errors import AttachError, CostError, GossamerError
from gossamer.core.schedule import Schedule
from gossamer.costs import Cluster
from gossamer.costs.laws import AtShare
from gossamer.costs.quantities import say_size
from gossamer.planning.baselines import ALONE, WITHOUT, PlannedBaseline, baselines, between_shards, ddp, sharded
from gossamer.planning.events import Busy, OptimizerSteps, Ready
from gossamer.planning.losses import Money, money_of, time_kept
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.own_pace import at_their_own_pace, needs_simulation, simulated_ranks
from gossamer.planning.peak import PeakMemory, memory_of
from gossamer.planning.pieces import Programs
from gossamer.planning.rates import BUSY, Interval, busy_at, pays_between
from gossamer.planning.replay import Replay, StartProgram, Step, StepSeconds
from gossamer.planning.timed_steps import TimedSteps
from gossamer.planning.work import MeasuredWork, WorkSource
from gossamer.planning.work_tables import WorkInFile, work_of
from gossamer.recipe import Recipe
from gossamer.runtime.outlasting import cannot_shard

LIKE = 960  # ranks: worlds that differ by a multiple of it are divided alike by most numbers of ranks in a group
NULL_REACHES = {"ring": 0.98, "pairs": 0.91, "one": 0.96}  # of a link, in the null model

LINE_UP = (
    "bf16",
    "int8",
    "qsgd",
    "terngrad",
    "topk",
    "powersgd",
    "diana",
    "ef21",
    "allreduce + delayed()",
    "local_sgd(8)",
    "local_sgd(32)",
    "slowmo(32)",
    "scatter(qsgd()) + local_sgd(8)",
    "scatter(qsgd()) + local_sgd(32)",
    "diloco(32)",
    "streaming_diloco(32)",
    "overlap_local_sgd(8)",
    "sgp",
    "osgp",
    "osgp(every=4)",
    "backup",
)
"""One of each family of methods, and rounds of 8 and of 32 steps."""


def line_up(ranks_per_node: int) -> list[str]:
    """The recipes to plan; where ranks share a node, in two levels, and some flat ones to show what that costs.

    >>> line_up(8)[:2]
    ['bf16 + per_node(8)', 'int8 + per_node(8)']
    """
    if ranks_per_node == 1:
        return list(LINE_UP)
    flat = ("bf16", "qsgd", "topk", "local_sgd(32)")
    return [f"{name} + per_node({ranks_per_node})" for name in LINE_UP] + list(flat)


@dataclass(frozen=True)
class Prepared:
    """A recipe on a model, cut into pieces once; its seconds follow from the cluster's rates."""

    steps: Sequence[Step]
    warm: int
    model: ModelCost
    programs: Programs
    copies: float  # of the model, which the schedule keeps
    overlaps: bool  # programs run while later steps compute
    simulated: int = 0  # ranks, where no one rank stands for all
    choice: str = ""  # of `auto`

    @property
    def keeps(self) -> float:
        """Bytes that a rank keeps between steps besides the model and its optimizer."""
        return self.programs.state_bytes + self.copies * self.model.wide * self.model.numel

    @cached_property
    def memory(self) -> PeakMemory:
        """What a rank holds at its peak. One rank is rehearsed for it, the first time that it is asked for."""
        return memory_of(self.programs, self.model, self.keeps)

    def seconds(self, cluster: Cluster, work: float = 1.0) -> StepSeconds:
        cluster = between_shards(cluster, self.programs.sharing)
        if self.simulated:
            cycle = self.steps[self.warm :]
            return at_their_own_pace(self.programs.recipe, self.model, cluster, cycle, work, self.simulated)
        return Replay(cluster, self.model, work).seconds(self.steps, self.warm)

    def null_seconds(self, cluster: Cluster) -> float:
        """The simplest model that is any good: bytes over rate, and the step on an unlimited network, less what may overlap."""
        found = self.seconds(cluster)
        if cluster.rate == inf:
            return found.step
        free = self.seconds(cluster.at_rate(inf)).step
        pieces = [p for step in self.steps for a in step if isinstance(a, StartProgram) for p in a.pieces]
        pattern = next((p.crossing.pattern for p in pieces if p.crossing is not None), "ring")
        wire = found.card / (cluster.rate * cluster.payload * NULL_REACHES[pattern])
        return wire + free - min(0.3 * free, 0.35 * wire)


def prepare(recipe: "str | Recipe", model: ModelCost, cluster: Cluster, work: WorkSource, shards: int = 1) -> Prepared:
    """Rehearse a recipe's schedule for whole rounds, and cut each of its programs into pieces."""
    parsed = Recipe.of(recipe).bound(dict(model.shapes))
    cluster = between_shards(cluster, shards)
    programs = Programs(parsed, model.shapes, cluster, work, sharing=shards, momenta=model.momenta)
    _refuse_misfit(parsed, [b.layout for b in programs.buckets], programs.size, cluster.ranks_per_node)
    timed, parts = TimedSteps(programs), parsed.schedule.shape.micro_batches
    steps = [_narrowed(step, model, cluster) for step in timed.steps] if model.is_narrow else timed.steps
    return Prepared(
        [each for step in steps for each in (*[WITHOUT] * (parts - 1), step)],  # a step is a micro-batch, as DDP's is
        timed.warm * parts,
        replace(model, buckets=timed.names, waits=parsed.schedule.shape.period // _rounds_in(parsed.schedule) * parts),
        programs,
        timed.copies,
        timed.overlaps,
        simulated_ranks(parsed, programs.size) if needs_simulation(parsed, cluster, timed.overlaps) else 0,
    )


def chosen(recipe: "str | Recipe", model: ModelCost, cluster: Cluster, work: WorkSource, shards: int = 1) -> Prepared:
    """As `prepare`; of `auto`, the recipe that it is predicted to choose: the fastest, if that gains on dense what `auto` asks."""
    mine = Recipe.of(recipe).bound(dict(model.shapes))
    if not isinstance(auto := mine.controller, Auto):
        return prepare(recipe, model, cluster, work, shards)
    pairs = zip((DENSE, *auto.allow), mine.reached, strict=True)
    found = [replace(prepare(one, model, cluster, work, shards), choice=name) for name, one in pairs]
    steps = [one.seconds(cluster).step for one in found]
    least = min(steps)
    return found[steps.index(least) if least <= (1 - auto.gain) * steps[0] else 0]


def _narrowed(step: Step, model: ModelCost, cluster: Cluster) -> Step:
    """The step with a pass that copies the means into gradients of fewer bits, before the optimizer reads them."""
    if not any(isinstance(action, Ready) for action in step):
        return step
    copies = Busy((model.wide + model.width) * model.numel / cluster.memory_rate)
    place = next((i for i, action in enumerate(step) if isinstance(action, OptimizerSteps)), len(step))
    return (*step[:place], copies, *step[place:])


def _refuse_misfit(recipe: Recipe, layouts: Sequence[Layout], size: int, per_node: int) -> None:
    """Raise AttachError if a recipe cannot run on so many ranks; it is refused on as many, also where fewer are checked first."""
    with suppress(GossamerError):
        return recipe.fits(Binding(_checked(size, per_node), layouts))
    return recipe.fits(Binding(size, layouts))


def _checked(size: int, per_node: int) -> int:
    """The world in which a recipe is checked: of very many ranks a smaller one with the same remainders.

    >>> _checked(1024, 8), _checked(10_000, 8)
    (1024, 1360)
    """
    period = lcm(LIKE, per_node)
    return size if size < 2 * period else period + size % period


@dataclass(frozen=True, kw_only=True)
class Row:
    """A recipe, or a baseline, in a plan. Where a recipe cannot run, `error` says why and all else is empty."""

    name: str
    seconds: StepSeconds | None = None
    low: float = 0.0
    high: float = 0.0
    of: Mapping[str, float] = field(default_factory=dict[str, float])  # of each baseline's step
    pays: Mapping[str, list[Interval]] = field(default_factory=dict[str, list[Interval]])  # against each baseline
    busy_at: Mapping[float, float] = field(default_factory=dict[float, float])  # rates, by utilisation
    rounds: Mapping[float, int] = field(default_factory=dict[float, int])  # steps of the shortest round, by utilisation
    memory: PeakMemory | None = None  # of a recipe's rank, at its peak
    latency: float = 0.0  # seconds a step that no rate shortens and nothing hides
    kept: float | None = None  # the share of time that failures leave
    money: Money | None = None  # a step of all hosts
    estimated: bool = False
    simulated: int = 0  # ranks, for a recipe whose ranks do not all wait for the slowest
    choice: str = ""  # what `auto` is predicted to choose
    work: str = ""  # where processor time comes from
    error: str = ""

    @property
    def every(self) -> int | None:
        """Steps of the shortest round that keeps machines busy for .9 of the time, for recipes with rounds."""
        return self.rounds.get(0.9)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What `plan` found: the baselines, and the recipes from the fastest on."""

    model: ModelCost
    cluster: Cluster
    shards: int
    accumulate: int
    baselines: Sequence[Row]
    recipes: Sequence[Row]
    changes: Mapping[str, float] = field(default_factory=dict[str, float])  # seconds a step after one change
    measuring: float = 0.0  # processor seconds spent on measuring

    @property
    def dense(self) -> Row:
        return self.baselines[0]

    @property
    def possible(self) -> list[Row]:
        return [row for row in self.recipes if row.seconds is not None]


def plan(
    model: ModelCost,
    cluster: Cluster,
    recipes: Sequence["str | Recipe"] = (),
    *,
    work: WorkSource | None = None,
    accumulate: int = 4,
    shards: int = 1,
    curves: bool = True,
    tell: Callable[[str], None] = lambda name: None,
) -> TrainingPlan:
    """Plan recipes (by default the line-up) on a cluster. `curves` adds the rates between which each pays.

    `tell` is called with each recipe's name before it is planned.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import known_model
    >>> found = plan(known_model("gpt2", 0.35), from_flags(nodes=2, gpus=1, rate=125e6), ["topk"], curves=False)
    >>> found.recipes[0].of["ddp"] < 0.5
    True
    """
    refuse_odd_ranks(cluster, shards)
    work, model = work or work_of(cluster), model.at_speed(cluster.speed)
    mine = sharded(model, cluster, shards) if shards > 1 else model
    others = _Baselines(baselines(model, cluster, accumulate, shards), model, cluster)
    planner = _Planner(mine, cluster, work, shards, others, curves)
    rows, alone = list[Row](), shards > 1 or cluster.nodes == 1  # in two levels nothing is compressed inside a host
    for recipe in recipes or line_up(1 if alone else cluster.ranks_per_node):
        tell(str(recipe))
        rows.append(planner.row(recipe))
    rows.sort(key=lambda row: inf if row.seconds is None else row.seconds.step)
    spent = work.seconds if isinstance(work, MeasuredWork) else 0.0
    return TrainingPlan(
        model=model,
        cluster=cluster,
        shards=shards,
        accumulate=accumulate,
        baselines=others.rows(curves),
        recipes=rows,
        changes=_changes(rows, others, cluster),
        measuring=spent,
    )


def refuse_to_shard(recipe: "str | Recipe", shards: int) -> None:
    """Raise AttachError for a recipe that `attach` refuses on a model that is cut into so many shards."""
    if shards > 1 and (why := cannot_shard(Recipe.of(recipe))):
        raise AttachError(why)


def refuse_odd_ranks(cluster: Cluster, shards: int) -> None:
    """Raise CostError for a cluster of one rank, and for shards that its hosts are not cut into."""
    if shards > 1 and (cluster.ranks_per_node % shards or cluster.size == shards):
        raise CostError(
            f"--shard {shards}: {cluster.ranks_per_node} ranks a node, on {cluster.nodes} nodes, are not cut into groups of {shards}; "
            "give a divisor of the ranks of a node, and two groups at least"
        )
    if cluster.size < 2:
        raise CostError("one rank alone sends nothing: plan at least two")


def _changes(rows: Sequence[Row], others: "_Baselines", cluster: Cluster) -> dict[str, float]:
    """Seconds a step after one change: a link twice as fast, twice the accumulation, or the fastest recipe."""
    out = dict[str, float]()
    if cluster.rate < inf:
        out["a link twice as fast"] = others.seconds(others.names[0], 2 * cluster.rate).step
    if "ddp" in others.names:
        out["two micro-batches a step"] = others.twice().step
    if rows and rows[0].seconds is not None:
        out[f"the recipe, to {rows[0].name}"] = rows[0].seconds.step
    return out


class _Baselines:
    """The baselines' seconds, at the cluster's rate and at others."""

    def __init__(self, all: Sequence[PlannedBaseline], model: ModelCost, cluster: Cluster) -> None:
        self._all, self._model, self._cluster = all, model, cluster
        self._known = dict[tuple[str, float], StepSeconds]()

    @property
    def names(self) -> list[str]:
        return [baseline.name for baseline in self._all if baseline.name != "compute"]

    def seconds(self, name: str, rate: float | None = None) -> StepSeconds:
        key = name, self._cluster.rate if rate is None else rate
        if key not in self._known:
            baseline = next(b for b in self._all if b.name == name)
            self._known[key] = baseline.seconds(self._cluster if rate is None else self._cluster.at_rate(rate))
        return self._known[key]

    def twice(self) -> StepSeconds:
        """DDP with two micro-batches a step."""
        return ddp(self._model, self._cluster.size, accumulate=2).seconds(self._cluster)

    def rows(self, curves: bool) -> list[Row]:
        out, kept = list[Row](), time_kept(None, self._cluster)
        for baseline in self._all:
            found = self.seconds(baseline.name)
            steps = found.step, *(baseline.seconds(c).step for c in bounds(self._cluster))
            of = {name: found.step / self.seconds(name).step for name in self.names}
            busy = dict[float, float]()
            if curves and baseline.name != "compute":
                busy = busy_at(lambda rate, name=baseline.name: self.seconds(name, rate).utilisation)
            row = Row(name=baseline.name, seconds=found, low=min(steps), high=max(steps), of=of, busy_at=busy)
            out.append(replace(row, kept=kept, money=money_of(found, self._cluster, kept)))
        return out


def bounds(cluster: Cluster) -> tuple[Cluster, Cluster]:
    """The cluster at its best and at its worst: figures that were not measured are uncertain, and computing may be random."""
    measured = cluster.source("efficiency") == "measured"
    off, late = (0.04, 1.2) if measured else (0.1, 2.0)
    patterns = ("ring", "pairs", "one", "shared")
    best = {p: min(cluster.reaches(p) * (1 + off), 1.0) for p in patterns}
    worst = {p: cluster.reaches(p) * (1 - off) for p in patterns}
    quick = tuple(replace(h, latency=h.latency / late) for h in cluster.hosts)
    slow = tuple(replace(h, latency=h.latency * late) for h in cluster.hosts)
    return (
        replace(cluster, efficiency=best, hosts=quick, law=AtShare(cluster.law, 0.1)),
        replace(cluster, efficiency=worst, hosts=slow, law=AtShare(cluster.law, 0.9)),
    )


@dataclass(frozen=True)
class _Planner:
    """Plans one recipe after the other."""

    model: ModelCost
    cluster: Cluster
    work: WorkSource
    shards: int
    others: "_Baselines"
    curves: bool

    def row(self, recipe: "str | Recipe") -> Row:
        name, cluster, others = str(recipe), self.cluster, self.others
        work = self.work.for_another() if isinstance(self.work, WorkInFile) else self.work
        try:
            refuse_to_shard(recipe, self.shards)
            prepared = chosen(recipe, self.model, cluster, work, self.shards)
            if prepared.memory.peak > cluster.memory:
                return Row(name=name, memory=prepared.memory, error=_too_large(prepared.memory, cluster.memory))
            found = prepared.seconds(cluster)
        except GossamerError as error:
            return Row(name=name, error=str(error))
        best, worst = bounds(cluster)
        at_once = replace(cluster, hosts=tuple(replace(h, latency=0.0) for h in cluster.hosts))
        is_measured = not work.lacks if isinstance(work, WorkInFile) else isinstance(work, MeasuredWork)
        least, most = (0.85, 1.15) if is_measured else (0.3, 3.0)
        curves = self.curves and not prepared.simulated  # a simulation takes seconds
        pays, busy = self._curves(prepared) if curves else ({}, {})
        return Row(
            name=name,
            seconds=found,
            low=min(prepared.seconds(best, least).step, found.step),
            high=max(prepared.seconds(worst, most).step, found.step),
            of={base: found.step / others.seconds(base).step for base in others.names},
            pays=pays,
            busy_at=busy,
            rounds=_rounds(prepared, found, cluster),
            memory=prepared.memory,
            latency=max(found.step - prepared.seconds(at_once).step, 0.0),
            estimated=prepared.programs.estimated,
            work=work.name,
            simulated=prepared.simulated,
            choice=prepared.choice,
            kept=(kept := time_kept(recipe, cluster)),
            money=money_of(found, cluster, kept),
        )

    def _curves(self, prepared: Prepared) -> tuple[dict[str, list[Interval]], dict[float, float]]:
        """The rates between which a recipe pays, by baseline, and those that keep machines busy."""
        known = dict[float, StepSeconds]()

        def at(rate: float) -> StepSeconds:
            if rate not in known:
                known[rate] = prepared.seconds(self.cluster.at_rate(rate))
            return known[rate]

        def against(base: str) -> Callable[[float], float]:
            return lambda rate: at(rate).step / self.others.seconds(base, rate).step

        pays = {base: pays_between(against(base)) for base in self.others.names}
        return pays, busy_at(lambda rate: at(rate).utilisation)


def _too_large(needed: PeakMemory, memory: float) -> str:
    return (
        f"it does not fit: at its peak a rank holds {say_size(needed.peak)} besides activations ({needed.in_words()}), and a rank may "
        f"use {say_size(memory)}"
    )


def _rounds_in(schedule: Schedule) -> int:
    """The rounds in a period of a schedule, at whose ends ranks wait for each other."""
    first, period = schedule.shape.prelude + 1, schedule.shape.period
    return max(sum(map(schedule.ends_round, range(first, first + period))), 1)


def _rounds(prepared: Prepared, found: StepSeconds, cluster: Cluster) -> dict[float, int]:
    """The shortest rounds that keep machines so busy, if what a round adds does not depend on its length."""
    schedule, shape = prepared.programs.recipe.schedule, prepared.programs.recipe.schedule.shape
    alike = not prepared.simulated  # else the slowest rank alone is longer in a step than all ranks together
    sends_within = shape.mixer is not None or schedule.ranks_per_node > 1  # the more, the longer a round is
    if shape.averages_gradients or shape.period == 1 or prepared.overlaps or sends_within or not alike:
        return {}
    alone = Replay(cluster, prepared.model).seconds([ALONE], 0).step
    added = (found.step - alone) * shape.period / _rounds_in(schedule)
    # Seconds of a step that are left for what a round adds; none where ranks wait longer than that for slow ones.
    left = {share: found.computing / share - alone for share in BUSY}
    return {share: max(ceil(round(added / seconds, 9)), 1) for share, seconds in left.items() if seconds > 0}
