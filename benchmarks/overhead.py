"""What the engine costs: processor time that recipes add to computing alone, over what DDP adds to it, 4 ranks on loopback.

torchrun --nproc-per-node 4 benchmarks/overhead.py [RECIPE ...] [--turns 40] [--steps 3] [--json FILE]

All contenders take short turns, in an order that changes from turn to turn, and a turn's first step is not counted: it
finds its model gone from the caches. What a step costs is the processor time of all ranks' processes over it, per rank: it is
steadier than the clock where cores are shared. Yet computing itself moves while a run lasts, so only differences within one
turn are taken: `added` is the mean over turns of (a contender - computing alone), without the fifth at either end. The
interval holds 95 of 100 resamplings of the turns.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import gossamer
from gossamer.workloads.transformer import Transformer

BARS = {"allreduce": 1.0, "terngrad": 0.7, "qsgd": 0.7, "topk": 0.9, "powersgd": 0.9}  # of what DDP adds, at most
WARM = 3  # turns in which kernels are compiled and memory is found
RESAMPLINGS = 2000


class Turn(NamedTuple):
    """A contender's mean step, in milliseconds: of processor time per rank, and by this rank's clock."""

    processor: float
    clock: float


def contender(kind: str) -> Callable[[], None]:
    """One training step of the 5.8 M-parameter language model."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if kind == "ddp":
        forward = torch.nn.parallel.DistributedDataParallel(model)
    elif kind != "compute":
        gossamer.attach(model, optimizer, kind)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        optimizer.zero_grad()
        forward(torch.randint(2048, (4, 33), generator=generator)).backward()
        optimizer.step()

    return step


def take_turn(step: Callable[[], None], steps: int) -> Turn:
    step()
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    mine = torch.tensor([time.process_time() - used, time.perf_counter() - began], dtype=torch.float64)
    clock = float(mine[1])
    dist.all_reduce(mine)
    return Turn(1000 * float(mine[0]) / steps / dist.get_world_size(), 1000 * clock / steps)


def measure(names: Sequence[str], turns: int, steps: int) -> dict[str, list[Turn]]:
    contenders = {name: contender(name) for name in names}
    taken: dict[str, list[Turn]] = {name: [] for name in names}
    rng = random.Random(0)  # the same on all ranks, who must take the same turns
    for turn in range(WARM + turns):
        for name in rng.sample(names, len(names)):
            result = take_turn(contenders[name], steps)
            if turn >= WARM:
                taken[name].append(result)
    return taken


def trimmed(values: Sequence[float]) -> float:
    """The mean without the fifth at either end."""
    out = len(values) // 5
    kept = sorted(values)[out : len(values) - out]
    return sum(kept) / len(kept)


def interval(added: Sequence[float], ddp: Sequence[float]) -> tuple[float, float]:
    """Where the ratio of two trimmed means lies; both are of the same turns."""
    rng, ratios = random.Random(0), list[float]()
    for _ in range(RESAMPLINGS):
        drawn = rng.choices(range(len(added)), k=len(added))
        ratios.append(trimmed([added[i] for i in drawn]) / trimmed([ddp[i] for i in drawn]))
    ratios.sort()
    return ratios[RESAMPLINGS // 40], ratios[-RESAMPLINGS // 40]


def verdict(bar: float | None, low: float, high: float) -> str:
    if bar is None:
        return ""
    return f"bar {bar:.2f}: " + ("met" if high <= bar else "not met" if low > bar else "open, within the noise")


def judge(name: str, taken: dict[str, list[Turn]]) -> dict[str, object]:
    alone = [turn.processor for turn in taken["compute"]]
    added, ddp = ([t.processor - a for t, a in zip(taken[n], alone, strict=True)] for n in (name, "ddp"))
    low, high = interval(added, ddp)
    return {
        "recipe": name,
        "cpu_ms": round(trimmed([t.processor for t in taken[name]]), 1),
        "added_ms": round(trimmed(added), 1),
        "added_of_ddp": round(trimmed(added) / trimmed(ddp), 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "step_ms": round(trimmed([t.clock for t in taken[name]]), 1),
        "verdict": verdict(BARS.get(name), low, high),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=[*BARS])
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    before = os.getloadavg()
    taken = measure(["compute", "ddp", *args.recipes], args.turns, args.steps)
    if dist.get_rank() == 0:
        rows = [judge(name, taken) for name in taken]
        print(f"load {before[0]:.1f} before, {os.getloadavg()[0]:.1f} after (its own is {dist.get_world_size()})")
        for row in rows:
            print(json.dumps(row))
        if args.json:
            args.json.write_text(json.dumps({"load": before, "rows": rows}, indent=1))
    dist.barrier()
    os._exit(0)


main()
