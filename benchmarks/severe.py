"""A network ten times slower than the demo's: time to DDP's quality, and the share of the time that is computing.

gossamer lab --hosts 4 --rate 16mbit -- python benchmarks/severe.py [RECIPE ...] [--steps 240] [--patience 2]

DDP itself would take --steps times 17 seconds, so its time is arithmetic: --steps times the median of --ddp-steps of its own here. Its
quality is trained without a network: every rank takes all ranks' batches, whose mean gradient is DDP's. A recipe trains for --patience
times as many steps; its time is that of the first round whose models, judged afterwards, are as good as DDP's last, where DDP's
time without a network is 1 T.
Before and after each recipe all ranks compute at once, without a word to each other: the mean of those steps is what computing
takes, for T and for utilisation, computing over the recipe's mean step. A processor that others share moves between recipes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.bench.workloads import Workload, get
from gossamer.costs import severity
from gossamer.recipe import Recipe

LINE_UP = (
    "diloco(30) + scatter(eden(4))",
    "diloco(30) + scatter(eden(2))",
    "diloco(100) + scatter(eden(4))",
    "diloco(100) + scatter(eden(2))",
    "streaming_diloco(30) + scatter(eden(4))",
    "eager_diloco(30) + scatter(eden(4))",
    "sparse_loco",
    "sparse_loco(places='rice')",
)
ALONE_STEPS = 40
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass
class Result:
    """What a recipe took until it was as good as DDP, or in all where it never was."""

    quality: float  # the mean over ranks, each of which judges its own model
    steps: int
    seconds: float
    step: float  # seconds of a step, the mean of all
    computing: float  # seconds of a step that computes alone, the mean of those before and after
    sent: float  # bytes a step, by the ledger; judging is not in it
    reached: bool


def train_step(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    workload.loss(model, workload.batch(step, dist.get_rank(), dist.get_world_size())).backward()
    optimizer.step()


def computing_step(workload: Workload) -> float:
    """Seconds of a mean step in which all ranks compute, and send nothing; of the slowest rank."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    train_step(workload, model, optimizer, 0)
    dist.barrier()
    began = time.perf_counter()
    for step in range(ALONE_STEPS):
        train_step(workload, model, optimizer, step)
    return slowest((time.perf_counter() - began) / ALONE_STEPS)


def ddp_step(workload: Workload, steps: int) -> float:
    """Seconds of the median of so many of DDP's steps; of the slowest rank."""
    model = workload.model()
    optimizer, forward = workload.optimizer(model), DistributedDataParallel(model)
    seconds = list[float]()
    for step in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        train_step(workload, forward, optimizer, step)
        seconds.append(time.perf_counter() - began)
    return slowest(statistics.median(seconds[1:]))


def slowest(seconds: float) -> float:
    taken = torch.tensor([seconds])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def quality_of_ddp(workload: Workload, optimizer_of: OptimizerOf, hosts: int, steps: int) -> float:
    """What DDP's model is worth after so many steps: the same steps, taken here for all ranks."""
    model = workload.model()
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hosts):
            (workload.loss(model, workload.batch(step, rank, hosts)) / hosts).backward()
        optimizer.step()
    return workload.evaluate(model)


def as_good(workload: Workload, quality: float, target: float) -> bool:
    return quality <= target if workload.lower_is_better else quality >= target


def race(workload: Workload, text: str, target: float, most: int) -> Result:
    """Train by a recipe, keep each rank's model at the end of each round, and look afterwards when it was as good as DDP's.

    To judge in between would give messages in flight time to arrive.
    """
    recipe, model = Recipe.of(text), workload.model()
    optimizer = workload.optimizer(model)
    alone = computing_step(workload)
    spent, kept = 0.0, list[tuple[int, float, dict[str, Tensor]]]()
    with gossamer.attach(model, optimizer, recipe) as comm:
        before = comm.ledger.sent  # all ranks have been sent rank 0's model
        for step in range(1, most + 1):
            began = time.perf_counter()
            train_step(workload, model, optimizer, step - 1)
            spent += time.perf_counter() - began
            if recipe.schedule.ends_round(step):
                kept.append((step, spent, {name: x.clone() for name, x in model.state_dict().items()}))
        sent = (comm.ledger.sent - before) / most
    alone = (alone + computing_step(workload)) / 2
    for step, seconds, state in kept:
        model.load_state_dict(state)
        quality = torch.tensor([workload.evaluate(model)])
        dist.all_reduce(quality)
        mean = float(quality) / dist.get_world_size()
        if as_good(workload, mean, target) or step == kept[-1][0]:
            return Result(mean, step, seconds, spent / most, alone, sent, as_good(workload, mean, target))
    raise SystemExit(f"{text} ends no round within {most} steps; give more --steps")


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=LINE_UP)
    parser.add_argument("--workload", default="lm")
    parser.add_argument("--rate", type=float, default=16.0, help="Mbit/s of the lab's links, for severity")
    parser.add_argument("--steps", type=int, default=240, help="of DDP")
    parser.add_argument("--ddp-steps", type=int, default=10, help="of DDP that are timed")
    parser.add_argument("--patience", type=float, default=2.0, help="recipes may take so many times DDP's steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = get(args.workload)
    workload.prepare()
    computing, dense = computing_step(workload), ddp_step(workload, args.ddp_steps)
    parameters = sum(p.numel() for p in workload.model().parameters())
    say(
        f"severity {severity(parameters, args.rate * 1e6 / 8, computing):.3g}: computing {1000 * computing:.0f} ms a step"
    )
    target = quality_of_ddp(workload, workload.optimizer, dist.get_world_size(), args.steps)
    say(
        f"ddp: {target:.4f} after {args.steps} steps in {args.steps * dense:.0f} s, by arithmetic: {args.steps} times the median "
        f"of {args.ddp_steps} of its steps, {dense:.2f} s; utilisation {computing / dense:.3f}"
    )
    for text in args.recipes:
        found = race(workload, text, target, round(args.patience * args.steps))
        step, whole, alone = found.step, args.steps * dense, args.steps * found.computing
        told = f"{found.seconds:.1f} s, {found.seconds / whole:.4f} of ddp's, {found.seconds / alone:.2f} T"
        say(
            f"{text:42} {'reached' if found.reached else 'MISSED'} {found.quality:.4f} in {found.steps} steps: {told}; step "
            f"{1000 * step:.0f} ms, of which computing {1000 * found.computing:.0f}, utilisation {found.computing / step:.3f}, "
            f"sent {found.sent / 1e3:.1f} kB a step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
