"""Simulates a whole training run in one process, on a virtual clock.

The same worker, recipe and algorithms as on real processes; only the fabric differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from heapq import heapify, heapreplace

import torch
from torch import Tensor, nn

from gossamer.core.errors import CostError
from gossamer.core.verbs import Compute, Program, now
from gossamer.costs import Cluster
from gossamer.costs.events import EventClock, Events
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.links import ClusterLinks
from gossamer.fabrics.sim import Network, TimeSpan, simulate
from gossamer.kernels.finite import all_finite
from gossamer.planning import bytes_per_step
from gossamer.planning.events import AverageRequest
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.pieces import Piece, Programs
from gossamer.planning.work import WorkSource
from gossamer.planning.work_tables import work_of
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.simulated_bodies import Replica, replicas, replicas_of_one_body

Backward = Callable[[nn.Module, int, int], float]  # (model, rank, step): leaves gradients in .grad, returns the loss
Seconds = Callable[[int, int], float]  # (rank, step): the seconds of computing in a step, on the virtual clock
GoesOn = Callable[[int, float], bool]  # (step, virtual clock): True if a rank makes this step
Listen = Callable[[int, Program[None]], Program[None]]  # (rank, its program): the program wrapped by a listener


@dataclass
class Trained:
    replicas: list[Replica]
    ledger: Ledger
    spans: list[TimeSpan] = field(default_factory=list[TimeSpan])  # time lines; see `fabrics.sim`

    @property
    def seconds(self) -> float:
        return max(r.clock for r in self.replicas)

    def moments(self, steps: int) -> list[float]:
        """When each step ended on the rank that made most, or the first of them: when it began to compute for the next one."""
        first = max(self.replicas, key=lambda replica: len(replica.begins))
        return [*first.begins[1:], first.clock][:steps]


@dataclass(frozen=True)
class ClusterCosts:
    """What a step takes on a cluster: its links, the processor's work of each program, and the model's forward, backward and
    optimizer, all three as the cluster's law of computing draws them. A bucket is sent when its gradient is there, while the
    backward pass goes on.
    """

    links: ClusterLinks
    model: ModelCost
    pieces_of: Callable[[Recipe], Mapping[str, Sequence[float]]]  # the work of each program of a recipe

    def charge(self, rank: int, worker: Worker) -> None:
        """Charge a rank for the recipe that `auto` has put in force, and for candidates that it runs on the largest block."""
        if worker.recipe.controller.hears_times:
            self.links.in_force[rank] = self.pieces_of(worker.recipe)
            share = max(bucket.layout.numel for bucket in worker.buckets) * self.links.slowdown(rank) / self.model.numel
            worker.controller.times.virtual = lambda recipe: share * sum(map(sum, self.pieces_of(recipe).values()))

    def before(self, rank: int, step: int, parts: int, averages: bool) -> float:
        """Seconds of a step before its first gradient is there; the optimizer's count as the next step's."""
        model, passes = self.model, parts - averages
        alone = passes * (model.forward + model.backward) + averages * model.forward + model.optimizer
        return alone * self._slowdown(rank, step)

    def backward(self, rank: int, worker: Worker, bucket: int) -> Program[None]:
        """Pass the seconds of the backward pass until a bucket's gradients are there; they were computed with the loss."""
        yield Compute(lambda: None, "backward", self._arrives(rank, worker, bucket))

    def _arrives(self, rank: int, worker: Worker, bucket: int) -> float:
        """Seconds of the backward pass from the gradients of the bucket before to those of this one. A controller may have put
        other buckets in force than those with which the run began.
        """
        shares, buckets = self.model.shares, worker.buckets

        def ready(count: int) -> float:
            return max((shares[name] for each in buckets[:count] for name in each.names), default=0.0)

        until = 1.0 if bucket == len(buckets) - 1 else ready(bucket + 1)
        return (until - ready(bucket)) * self.model.backward * self._slowdown(rank, worker.step)

    def _slowdown(self, rank: int, step: int) -> float:
        host = self.links.slowdown(rank) if self.model.on_cores else 1.0 / self.links.host_of(rank).speed
        return host * self.links.cluster.law.at(rank, step) * self.links.events.factor(rank)

    def require(self, size: int) -> None:
        """Refuse another number of ranks than the cluster has."""
        if self.links.cluster.size != size:
            raise CostError(f"the cluster has {self.links.cluster.size} ranks and {size} train; give as many")

    def of_a_run(self) -> "ClusterCosts":
        """The same with events that none of their ranks has reached."""
        return replace(self, links=replace(self.links, events=EventClock(self.links.events.events), in_force={}))


def costs_on(
    cluster: Cluster,
    recipe: "str | Recipe",
    model: ModelCost,
    work: WorkSource | None = None,
    events: Events | None = None,
) -> ClusterCosts:
    """The costs of a recipe and a model on a cluster; `work` says where processor seconds come from, by default measured here,
    and `events` when a rank or a link is slow.

    Averages are charged; messages of gossip and of schedules with a server cost the processor nothing here.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import from_shapes
    >>> model = from_shapes({"w": (512, 512)}, 0.1, name="w", memory_rate=1e10)
    >>> costs = costs_on(from_flags(nodes=4, rate=25e6), "qsgd", model)
    >>> [*costs.links.pieces], len(costs.links.pieces["w"])
    (['w'], 3)
    """
    parsed, source = Recipe.of(recipe).bound(dict(model.shapes)), work or work_of(cluster)

    @cache
    def pieces_of(recipe: Recipe) -> dict[str, list[float]]:
        programs = Programs(recipe, model.shapes, cluster, source)
        asked = [programs.pieces([AverageRequest((i,))]) for i in range(len(programs.buckets))]
        return {bucket.name: _before_each(pieces) for bucket, pieces in zip(programs.buckets, asked, strict=True)}

    links = ClusterLinks(cluster, pieces_of(parsed), EventClock(events or Events()))
    return ClusterCosts(links, model, pieces_of)


def _before_each(pieces: Sequence[Piece]) -> list[float]:
    """The work before each request, with what was made or read while the one before it was under way."""
    return [piece.work + inside for piece, inside in zip(pieces, (0.0, *(piece.inside for piece in pieces)))]


def train(
    ranks: Sequence[Replica],
    backward: Backward,
    steps: int,
    network: Network | ClusterCosts | None = None,
    seconds: Seconds = lambda rank, step: 0.0,
    listen: Listen = lambda rank, program: program,
) -> Trained:
    """Train all ranks for `steps` optimizer steps each, side by side; one alone as it does under `attach`: nothing is averaged,
    and outer steps are taken.

    With `costs_on(...)` as the network, computing takes what it says, and not `seconds`. `listen` wraps each rank's program, and
    so sees its requests.

    >>> def linear(): return nn.Linear(2, 1, bias=False)
    >>> def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def backward(model, rank, step):
    ...     loss = (model(torch.ones(1, 2)) - rank).square().sum(); loss.backward(); return loss.item()
    >>> run = train(replicas("allreduce", linear, sgd, size=2), backward, steps=50)
    >>> round(run.replicas[0].model(torch.ones(1, 2)).item(), 3)
    0.5
    """
    if isinstance(network, ClusterCosts):
        network.require(len(ranks))
        if network.links.events.events.changes_ranks:
            raise CostError(
                "some ranks are to be lost, leave or come: give the events to gossamer.simulated_restarts.train"
            )
        costs = network.of_a_run()
        links = costs.links
        for replica in ranks:
            links.events.go_on(replica.worker.rank, replica.worker.step - 1)
    else:
        costs, links = seconds, network
    ledger = Ledger(per_node=ranks[0].worker.origin.ranks_per_node)
    for replica in ranks:
        replica.worker.record.listener = ledger.hear
        replica.begins.clear()
    programs = [listen(r.worker.rank, program(r, backward, steps, costs)) for r in ranks]
    outcome = simulate(programs, links, ledger)
    for replica, clock in zip(ranks, outcome.clocks, strict=True):
        replica.clock = clock
    return Trained(list(ranks), ledger, outcome.spans)


@dataclass
class Stale:
    """The result of asynchronous training: the server's model, and the staleness of each gradient in updates."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    staleness: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def train_on_arrival(
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    size: int,
    backward: Backward,
    updates: int,
    seconds: Seconds = lambda rank, step: 1.0,
) -> Stale:
    """The asynchronous baseline: a server applies every gradient as it arrives, however stale, and no rank waits for another.

    A rank takes the newest model, computes, hands its gradient in, and takes the newest again; what travels takes no time
    here. As a recipe it is `async_sgd`, in which each rank's own optimizer makes its steps. With ranks all alike a gradient is size - 1 updates old. Under plain SGD, a constant staleness s and a
    curvature c it is stable if lr c < 2 sin(pi / (2 (2 s + 1))): 2, 1, .62 for s = 0, 1, 2. `step` counts a rank's gradients.

    >>> def linear(): return nn.Linear(2, 1, bias=False)
    >>> def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.05)
    >>> def backward(model, rank, step):
    ...     loss = (model(torch.ones(1, 2)) - 1).square().sum(); loss.backward(); return loss.item()
    >>> run = train_on_arrival(linear, sgd, size=3, backward=backward, updates=60)
    >>> run.staleness[-1], run.seconds, round(run.losses[-1], 3)
    (2, 20.0, 0.0)
    """
    server = model()
    ranks = [model() for _ in range(size)]
    out, taken, begun = Stale(server, optimizer(server)), [0] * size, [1] * size
    for mine in ranks:
        mine.load_state_dict(server.state_dict())
    arrivals = [(seconds(rank, 1), rank) for rank in range(size)]
    heapify(arrivals)
    for done in range(updates):
        out.seconds, rank = arrivals[0]
        mine = ranks[rank]
        mine.zero_grad()
        out.losses.append(backward(mine, rank, begun[rank]))
        for p, q in zip(server.parameters(), mine.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        out.optimizer.step()
        out.staleness.append(done - taken[rank])
        mine.load_state_dict(server.state_dict())
        taken[rank], begun[rank] = done + 1, begun[rank] + 1
        heapreplace(arrivals, (out.seconds + seconds(rank, begun[rank]), rank))
    return out


def program(
    replica: Replica,
    backward: Backward,
    steps: int,
    costs: "ClusterCosts | Seconds",
    goes_on: GoesOn = lambda step, clock: True,
) -> Program[None]:
    """A rank's steps; before each of those on a cluster, `goes_on` is asked whether it is made."""
    worker = replica.worker

    def arrive(bucket: int) -> Program[None]:
        if isinstance(costs, ClusterCosts):
            yield from costs.backward(worker.rank, worker, bucket)

    last = worker.step + steps
    alone = worker.size == 1  # one rank trains as under `attach`: only parts that change the optimizer's steps act
    plain = alone and not worker.recipe.schedule.shape.works_alone
    if not alone:
        yield from worker.reopen()  # programs of an earlier `train` wait in a simulation that has ended
        yield from worker.begin()
    while worker.step < last:
        rank, step, parts = worker.rank, worker.step, worker.recipe.schedule.shape.micro_batches
        averages = worker.recipe.schedule.averages(step) and not alone
        clock = yield from now()
        if isinstance(costs, ClusterCosts):
            if not goes_on(step, clock):
                break
            costs.links.events.begin(rank, step, clock)
            costs.charge(rank, worker)
            before = costs.before(rank, step, parts, averages)
        else:
            before = parts * costs(rank, step)
        replica.begins.append(clock)
        loss, gradients = yield Compute(partial(_computed, replica, backward, averages), "compute", before)
        replica.losses.append(loss)
        replica.steps.append(step)
        worker.loss = loss
        if plain:
            descend(replica, averages)
            worker.step += 1
        else:
            take = partial(descend, replica, averages)
            yield from worker.train_step(gradients, take, replica.optimizer.step, arrive)
    if not alone:
        yield from worker.rest()


def _computed(replica: Replica, backward: Backward, averages: bool) -> tuple[float, list[Tensor]]:
    """The loss, and copies of the gradients that are to be averaged: the next rank may compute with the same model."""
    loss = compute_gradients(replica, backward)
    return loss, [bucket.gradients() for bucket in replica.worker.buckets] if averages else []


def compute_gradients(replica: Replica, backward: Backward) -> float:
    """Compute the mean gradient over the schedule's micro-batches; returns the mean loss."""
    parts = replica.worker.recipe.schedule.shape.micro_batches
    for group in replica.optimizer.param_groups:  # as its zero_grad does, without the profiler's record
        for p in group["params"]:
            p.grad = None
    losses, sums = list[float](), dict[Tensor, Tensor]()
    for _ in range(parts):
        losses.append(backward(replica.model, replica.worker.rank, replica.worker.step))
        for p in replica.model.parameters() if parts > 1 else ():
            if p.grad is not None:
                sums[p] = p.grad / parts + sums.get(p, 0.0)
                p.grad = None
    for p, gradient in sums.items():
        p.grad = gradient
    return sum(losses) / parts


def descend(replica: Replica, averages: bool) -> bool:
    """Set the gradients that ranks agreed on, where this step averages them, and step the optimizer; skips one that is not finite."""
    worker, steps = replica.worker, replica.turns.take()
    if averages:
        finite = worker.averaging.finite
        if steps:
            worker.update_step.put()
    else:
        finite = all_finite([p.grad for p in replica.model.parameters() if p.grad is not None])
    if finite and steps:  # as a loss scaler would
        worker.redirect()
        worker.update_step.enter(replica.optimizer)
        replica.optimizer.step()
        worker.update_step.leave(replica.optimizer)
    return finite


__all__ = [
    "Backward",
    "ClusterCosts",
    "Replica",
    "Seconds",
    "Stale",
    "Trained",
    "bytes_per_step",
    "costs_on",
    "replicas",
    "replicas_of_one_body",
    "train",
    "train_on_arrival",
]
