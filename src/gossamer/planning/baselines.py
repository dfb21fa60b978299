"""Training without gossamer, planned by the same clock: DDP, DDP in bf16, DDP with accumulation, FSDP and HSDP."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from gossamer.core.verbs import AllGather, AllReduce
from gossamer.costs import Cluster, Crossing, crossing_of
from gossamer.costs.cluster import COMM_THREADS, EFFICIENCY
from gossamer.planning.events import BackwardEnds, Busy, OptimizerSteps, Ready, StepEnds, Wait
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.pieces import Piece, cut_shards
from gossamer.planning.replay import Action, Replay, StartProgram, Step, StepSeconds, late_by

FIRST, CAP = 2**20, 25 * 2**20  # bytes of DDP's first bucket, and of all others
ALONE: Step = (BackwardEnds(), OptimizerSteps(), StepEnds())
WITHOUT: Step = (BackwardEnds(), StepEnds())  # of a micro-batch after which nothing is averaged
LAYER = re.compile(r"(?:.*?\.)?\d+\.")  # of a parameter's name, up to the number of its layer


@dataclass(frozen=True)
class PlannedBaseline:
    """A way to train that a plan is compared with."""

    name: str
    seconds: Callable[[Cluster], StepSeconds]


def compute(model: ModelCost) -> PlannedBaseline:
    """Each rank trains alone and sends nothing."""
    return PlannedBaseline("compute", lambda cluster: Replay(cluster, replace(model, waits=0)).seconds([ALONE], 0))


def ddp(model: ModelCost, size: int, *, bf16: bool = False, accumulate: int = 1) -> PlannedBaseline:
    """DistributedDataParallel: all-reduces of 25 MiB beside backward; two at once on gloo. A step is one of `accumulate`
    micro-batches, after the last of which gradients are averaged.
    """
    told = replace(model, buckets=_ddp_buckets(model), waits=accumulate, wide=model.width)
    name = "ddp-bf16" if bf16 else f"ddp, {accumulate} micro-batches" if accumulate > 1 else "ddp"

    def seconds(cluster: Cluster) -> StepSeconds:
        lanes, back = 2 if cluster.backend == "gloo" else 1, Busy(model.bytes * 2 / cluster.memory_rate)
        averages = _averaged(told, size, cluster, 2 if bf16 else model.width, lanes=lanes)
        steps: list[Step] = [WITHOUT] * (accumulate - 1) + [(*averages, back, OptimizerSteps(), StepEnds())]
        return Replay(cluster, told).seconds(steps * 2, accumulate)

    return PlannedBaseline(name, seconds)


def _ddp_buckets(model: ModelCost) -> list[list[str]]:
    """Parameters in reverse order; a bucket is full when it has reached its bytes."""
    buckets, filled = [list[str]()], 0
    for name in reversed(list(model.shapes)):
        buckets[-1].append(name)
        filled += model.width * prod(model.shapes[name])
        if filled >= (FIRST if len(buckets) == 1 else CAP):
            buckets.append([])
            filled = 0
    return [bucket for bucket in buckets if bucket]


def _averaged(
    model: ModelCost, size: int, cluster: Cluster, width: int, *, lanes: int = 1, sharing: int = 1
) -> Iterator[Action]:
    """Backward with an all-reduce of each bucket as it is ready, in elements of `width` bytes, and the wait for all."""
    # Bytes an element: read, write, and the same back.
    casts = 2.0 * (model.width + width) if width != model.width else 0.0
    for i, names in enumerate(model.buckets):
        numel = sum(prod(model.shapes[name]) for name in names)
        wire = torch.empty(numel, dtype=torch.float16 if width == 2 else torch.float32, device="meta")
        work = casts * numel / cluster.memory_rate
        yield Ready(i)
        piece = Piece(work, crossing_of(AllReduce(wire), 0, cluster, size, sharing))
        yield StartProgram(i, f"ring {i % lanes}", (piece,))
    yield BackwardEnds()
    yield Wait(tuple(range(len(model.buckets))))


# -- sharded models ----------------------------------------------------------------------------------------------------------


def sharded(model: ModelCost, cluster: Cluster, shards: int) -> ModelCost:
    """The model as one rank of a shard group has it: its part of each parameter, and gathers that computing hides in part."""
    # Scattering gradients takes as long as gathering what is trained.
    lengths = model.bytes, model.bytes + model.frozen
    scatter, gather = (_gather(model, n, shards, cluster).seconds(cluster) for n in lengths)
    forward, backward = max(model.forward, gather), max(model.backward, gather + scatter)
    return replace(
        model,
        shapes=cut_shards(model.shapes, shards),
        forward=forward,
        backward=backward,
        gathering=(forward - model.forward, backward - model.backward),
        gathered=_gathered(model),
        optimizer=model.optimizer / shards,
        frozen=model.frozen // shards,
    )


def _gathered(model: ModelCost) -> int:
    """Bytes that FSDP2 holds whole at once in backward: parameters and gradients of the root and of a layer, and besides the
    parameters of the next layer, which come, and the gradients of the last one, which leave.
    """
    layers = [sum(prod(model.shapes[n]) for n in names) for names in _modules(model) if LAYER.match(names[0])]
    root, whole = model.numel - sum(layers), 1 + model.frozen / model.bytes  # what is frozen comes with what is trained
    return round(model.width * (whole + 1) * (root + 2 * max(layers, default=0)))


def between_shards(cluster: Cluster, shards: int) -> Cluster:
    """The cluster of a recipe: on GPUs `attach` averages between replicas of a sharded model through the host and gloo."""
    if shards == 1 or cluster.backend == "gloo":
        return cluster
    reached = {pattern: cluster.reaches(pattern) for pattern in EFFICIENCY["gloo"]}  # of the same links
    return replace(cluster, backend="gloo", efficiency=reached, **COMM_THREADS["gloo"])


def fsdp(model: ModelCost) -> PlannedBaseline:
    """FSDP over all ranks: parameters are gathered for forward and for backward, gradients scattered, each beside computing."""

    def seconds(cluster: Cluster) -> StepSeconds:
        lengths = model.bytes, model.bytes + model.frozen
        scattered, gathered = (_gather(model, n, cluster.size, cluster) for n in lengths)
        scatter, gather = scattered.seconds(cluster), gathered.seconds(cluster)
        mine = model.in_turns(cluster.turns)
        late = mine.at_speed(1 / late_by(cluster.law, cluster.size, 1))
        forward, backward = max(late.forward, gather), max(late.backward, gather + scatter)
        optimizer = mine.optimizer / cluster.size
        waiting = late.forward + late.backward - mine.forward - mine.backward
        network = forward + backward - late.forward - late.backward
        total = forward + backward + optimizer
        sent, card = 2 * gathered.sent + scattered.sent, 2 * gathered.card + scattered.card
        return StepSeconds(total, mine.forward, mine.backward, 0.0, network, optimizer, sent, card, waiting)

    return PlannedBaseline("fsdp", seconds)


def hsdp(model: ModelCost, shards: int) -> PlannedBaseline:
    """HSDP: shards within a node; torch averages each module that it wraps between nodes by itself, in one all-reduce of a shard."""

    def seconds(cluster: Cluster) -> StepSeconds:
        mine = sharded(model, cluster, shards)
        told = replace(mine, buckets=_modules(mine), wide=mine.width)
        averaged = _averaged(told, cluster.size // shards, cluster, mine.width, sharing=shards)
        return Replay(cluster, told).seconds([(*averaged, OptimizerSteps(), StepEnds())] * 2, 1)

    return PlannedBaseline("hsdp", seconds)


def _modules(model: ModelCost) -> list[list[str]]:
    """Parameters of each module that FSDP2 wraps, as backward ends them: numbered layers, and last the root with all else."""
    layers = dict[str, list[str]]()
    for name in model.shapes:
        layers.setdefault(found[0] if (found := LAYER.match(name)) else "", []).append(name)
    return sorted(layers.values(), key=lambda names: (names is layers.get(""), max(model.shares[n] for n in names)))


def _gather(model: ModelCost, length: int, ranks: int, cluster: Cluster) -> Crossing:
    """Ring all-gathers of a whole model, of which each rank has its share: one for each numbered layer, and one for all else."""
    wire = torch.empty(length // ranks, dtype=torch.uint8, device="meta")
    whole, count = crossing_of(AllGather(wire), 0, cluster, ranks), len(_modules(model))
    return replace(whole, messages=count * whole.messages, between=count * whole.between)


def baselines(model: ModelCost, cluster: Cluster, accumulate: int, shards: int) -> Sequence[PlannedBaseline]:
    """What every plan is compared with, DDP first; for sharded models HSDP."""
    if shards > 1:
        return [hsdp(model, shards), fsdp(model)]
    narrower = [ddp(model, cluster.size, bf16=True)] if model.width > 2 else []
    return [ddp(model, cluster.size), *narrower, ddp(model, cluster.size, accumulate=accumulate), compute(model)]
