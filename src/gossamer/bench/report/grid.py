"""Replays the baselines and recipes of a plan on a grid of rates, latencies, numbers of hosts and seconds of computing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gossamer.core.errors import GossamerError
from gossamer.costs import Cluster
from gossamer.planning.baselines import baselines, sharded
from gossamer.planning.measured_model import with_step
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import Prepared, TrainingPlan, chosen
from gossamer.planning.rates import RATES
from gossamer.planning.replay import StepSeconds
from gossamer.planning.scaling import of_hosts
from gossamer.planning.verdict import Verdict, verdict_of
from gossamer.planning.work import WorkSource

LATENCIES = (0.0, 2e-4, 1e-3, 5e-3, 2.5e-2)  # seconds; the last is there so that what lies below it is read well
FACTORS = tuple(4 ** (k / 3) for k in range(-3, 4))  # of the step's seconds of computing
HOSTS = (2, 8, 64)  # and as many as the plan has


@dataclass(frozen=True)
class Grid:
    """A step's seconds at every point of the grid; rates change fastest, then latencies, computing and hosts.

    Baselines come first. A recipe that cannot run with so many hosts has None there; one that is simulated is left out.
    """

    hosts: Sequence[int]
    computing: Sequence[float]  # seconds
    latencies: Sequence[float]
    rates: Sequence[float]
    baselines: Sequence[str]
    seconds: dict[str, list[StepSeconds | None]]
    verdicts: list[Verdict]


def grid_of(
    plan: TrainingPlan, work: WorkSource, tell: Callable[[str], None] = lambda name: None, rates: Sequence[float] = ()
) -> Grid:
    """Replay what a plan has rows for and does not simulate. Recipes are cut into pieces once for each number of hosts.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import known_model
    >>> from gossamer.planning.plan import plan
    >>> from gossamer.planning.work import NoWork
    >>> here = from_flags(nodes=2, gpus=1, rate=1e9)
    >>> found = plan(known_model("gpt2", 0.35), here, ["topk"], work=NoWork(), curves=False)
    >>> grid = grid_of(found, NoWork(), rates=[1e8, 1e9])
    >>> len(grid.seconds["topk"]) == len(grid.hosts) * len(FACTORS) * len(LATENCIES) * 2
    True
    """
    cluster, model = plan.cluster, plan.model
    hosts = sorted({*HOSTS, cluster.nodes}) if len(cluster.hosts) == 1 else [cluster.nodes]
    computing, latencies = [factor * model.computing for factor in FACTORS], _latencies(cluster.latency)
    rates = rates or _rates(cluster.rate)
    based = [row.name for row in plan.baselines if row.name != "compute"]
    names = [*based, *_replayed(plan)]
    found: dict[str, list[StepSeconds | None]] = {name: [] for name in names}
    for count in hosts:
        tell(f"{count} hosts")
        there = cluster if count == cluster.nodes else of_hosts(cluster, count)
        points = _Points(plan, there, work, [(latency, rate) for latency in latencies for rate in rates])
        for seconds in computing:
            for name, cells in points.replayed(seconds).items():
                found[name] += cells
    verdicts = [_verdict_at(found, based, i) for i in range(len(found[based[0]]))]
    return Grid(hosts, computing, latencies, rates, based, found, verdicts)


def _latencies(own: float) -> Sequence[float]:
    """Those of the grid, and up to that of the plan, at which the page begins."""
    return LATENCIES if own <= LATENCIES[-2] else (*LATENCIES[:-1], own, 5 * own)


def _rates(own: float) -> Sequence[float]:
    """Those of the grid, and from a quarter of that of the plan, at which the page begins."""
    return RATES if own >= RATES[0] else [own / 4, own, *RATES]


def _replayed(plan: TrainingPlan) -> list[str]:
    """The recipes of the grid: a simulation takes seconds, so that of one at thousands of points would take hours."""
    return [row.name for row in plan.possible if not row.simulated]


class _Points:
    """All points with one number of hosts."""

    def __init__(
        self, plan: TrainingPlan, cluster: Cluster, work: WorkSource, links: Sequence[tuple[float, float]]
    ) -> None:
        self._plan, self._cluster = plan, cluster
        self._where = [located(cluster, rate, latency) for latency, rate in links]
        self._prepared: dict[str, Prepared | None] = {name: self._cut(name, work) for name in _replayed(plan)}

    def _cut(self, name: str, work: WorkSource) -> Prepared | None:
        try:
            return chosen(name, self._mine(self._plan.model), self._cluster, work, self._plan.shards)
        except GossamerError:
            return None

    def _mine(self, model: ModelCost) -> ModelCost:
        shards = self._plan.shards
        return sharded(model, self._cluster, shards) if shards > 1 else model

    def replayed(self, computing: float) -> dict[str, list[StepSeconds | None]]:
        """The seconds of each baseline and recipe at every latency and rate."""
        plan, cluster = self._plan, self._cluster
        model = with_step(plan.model, computing)
        out: dict[str, list[StepSeconds | None]] = {
            each.name: [each.seconds(there) for there in self._where]
            for each in baselines(model, cluster, plan.accumulate, plan.shards)
            if each.name != "compute"
        }
        mine = self._mine(model)
        for name, prepared in self._prepared.items():
            if prepared is None:
                out[name] = [None] * len(self._where)
                continue
            cut = prepared.model
            there = replace(prepared, model=replace(mine, buckets=cut.buckets, waits=cut.waits))
            out[name] = [there.seconds(cluster) for cluster in self._where]
        return out


def located(cluster: Cluster, rate: float, latency: float) -> Cluster:
    """The same cluster with another rate and latency of its links."""
    there = cluster.at_rate(rate)
    return replace(there, hosts=tuple(replace(h, latency=latency) for h in there.hosts))


def _verdict_at(found: dict[str, list[StepSeconds | None]], based: Sequence[str], point: int) -> Verdict:
    steps = {name: cells[point] for name, cells in found.items()}
    dense = {name: step for name in based if (step := steps[name]) is not None}
    recipes = {name: step.step for name, step in steps.items() if step is not None and name not in dense}
    return verdict_of(dense, dict(sorted(recipes.items(), key=lambda one: one[1])))
