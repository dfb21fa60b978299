"""A training loop as users write it, on the pretended device, and what the judges see of it."""

import gc
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.nursery import Nursery, RankError
from torch import Tensor, nn

import gossamer
from gossamer.core.schedule import TrainsElsewhere
from gossamer.integrations import Communicator
from gossamer.recipe import Recipe

PATIENCE = 6.0  # seconds that the watchdog gives an operation
STATE = 8  # bytes a parameter of the model and its momentum


@dataclass(frozen=True)
class Plan:
    """One run."""

    recipe: str
    ranks: int = 2
    eager: bool = False  # communicators made at once, as with init_process_group(device_id=...)
    backends: str = "nccl"  # what the user's group says of itself
    depth: int = 4  # hidden layers, each of two tensors
    width: int = 64
    warm: int = 2  # steps before anything is counted
    steps: int = 2  # steps that are counted
    triton: bool = True
    sets_device: bool = True  # does the loop call torch.cuda.set_device?
    resumes: bool = False  # goes on from a checkpoint that was loaded on the CPU

    def __str__(self) -> str:
        return f"{self.recipe} on {self.ranks} ranks, {'eager' if self.eager else 'lazy'}, {self.backends}"


@dataclass
class Seen:
    """What one rank's device saw, from the first step that is counted to the last."""

    parameters: int
    buckets: int
    steps: int
    losses: list[float]
    syncs: Counter[str]
    lane_syncs: Counter[str]
    launches: Counter[str]
    races: Counter[str]
    lifetimes: Counter[str]
    strays: Counter[str]
    kept: float  # bytes a parameter beyond model and momentum, after the step that leaves most
    peak: float
    crossed: int  # operations of process groups, after attach
    remembers: bool  # is there anything in a checkpoint?
    inverted: list[str] = field(default_factory=list[str])
    groups: list[str] = field(default_factory=list[str])  # how the process groups ended

    def syncs_a_step(self) -> float:
        return sum(self.syncs.values()) / self.steps

    def lane_syncs_a_step(self) -> float:
        return sum(self.lane_syncs.values()) / self.steps

    def launches_a_step(self) -> float:
        return sum(self.launches.values()) / self.steps


class World:
    """What has been seen of each plan; each is run once, and may be asked for by many tests."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._seen = dict[Plan, list[Seen] | RankError]()

    def run(self, plan: Plan) -> list[Seen]:
        """What each rank saw."""
        if plan not in self._seen:
            try:
                self._seen[plan] = self._nursery.run(plan.ranks, train, plan)
            except RankError as error:
                self._seen[plan] = RankError(f"{plan}: {error}")
        seen = self._seen[plan]
        if isinstance(seen, RankError):
            raise seen
        return seen


def train(rank: int, size: int, plan: Plan) -> Seen:
    """Train some steps, counted; on every rank at once."""
    from tests.gpu import nccl, orders, users
    from tests.gpu.programs import without_triton

    users.begin(plan)
    with nullcontext() if plan.triton else without_triton():
        seen = _train(rank, plan)
    gc.collect()
    logs: list[Any] = [None] * size
    dist.all_gather_object(logs, list(nccl.launched))
    seen.inverted = orders.inverted(logs)
    seen.groups = [group.ended for group in nccl.groups]
    return seen


def _train(rank: int, plan: Plan) -> Seen:
    from tests.gpu.diary import diary

    device = torch.device("cuda", rank + 1)  # GPU 0 is somebody else's
    torch.cuda.set_device(device if plan.sets_device else 0)
    torch.manual_seed(0)
    model = net(plan).to(device)
    recipe = Recipe.of(plan.recipe)
    own = isinstance(recipe.schedule, TrainsElsewhere) or any(
        "sends momentum" in part.traits for part in recipe.parts()
    )
    own |= recipe.update is not None and (recipe.update.is_step or "fades" in recipe.memory.traits)
    momentum = 0.0 if own else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum)
    count = sum(p.numel() for p in model.parameters())
    rng = torch.Generator().manual_seed(rank)
    losses = list[Tensor]()
    with gossamer.attach(model, optimizer, plan.recipe, deadline=20.0) as comm:
        crossed = diary.crossings
        for _ in range(plan.warm):
            losses.append(step(model, optimizer, comm, rng, device))
        if plan.resumes:
            on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in comm.state_dict().items()}
            comm.load_state_dict(on_cpu)
        _meet(comm)
        counted, diary.peak = _counters(), diary.live
        live = list[int]()
        for _ in range(plan.steps):
            losses.append(step(model, optimizer, comm, rng, device))
            _meet(comm)
            live.append(diary.live)
        kept, peak = max(live) - STATE * count, diary.peak - STATE * count
        syncs, lane_syncs, launches = (now - then for now, then in zip(_counters(), counted))
        crossed = diary.crossings - crossed
        buckets = len(comm.worker.buckets)
        remembers = end(comm)
    return Seen(
        parameters=count,
        buckets=buckets,
        steps=plan.steps,
        losses=[float(loss) for loss in losses],
        syncs=syncs,
        lane_syncs=lane_syncs,
        launches=launches,
        races=diary.races,
        lifetimes=diary.lifetimes,
        strays=diary.strays,
        kept=kept / count,
        peak=peak / count,
        crossed=crossed,
        remembers=remembers,
    )


def net(plan: Plan) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(32, plan.width)]
    for _ in range(plan.depth):
        layers += [nn.ReLU(), nn.Linear(plan.width, plan.width)]
    return nn.Sequential(*layers)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, rng: torch.Generator, device: torch.device
) -> Tensor:
    """One optimizer step of an ordinary loop, which never waits for the device: that would hide races."""
    optimizer.zero_grad()
    last = False
    while not last:
        with comm.accumulating() as last:
            batch = torch.randn(4, 32, generator=rng).pin_memory().to(device, non_blocking=True)
            loss = model(batch).square().mean()
            (loss / comm.accumulate).backward()
    comm.loss(loss.detach())  # pyright: ignore
    optimizer.step()
    return loss.detach()  # pyright: ignore


def end(comm: Communicator) -> bool:
    """What users do after training. Returns whether a checkpoint holds more than numbers."""
    comm.check_sync()
    with comm.consensus():
        pass
    comm.metrics()
    return any(isinstance(value, Tensor) and value.dim() for value in comm.state_dict().values())


def _counters() -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Counts of gossamer's own doing, by line."""
    from tests.gpu.diary import ELSEWHERE, diary, lock

    with lock:
        own = Counter({k: v for k, v in diary.syncs.items() if ELSEWHERE not in k})
        launches = Counter({k: v for k, v in diary.launches.items() if k != ELSEWHERE})
        return own, Counter(diary.lane_syncs), launches


def _meet(comm: Communicator) -> None:
    """So that no rank counts what another still makes it do."""
    dist.barrier()
    gc.collect()
