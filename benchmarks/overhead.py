"""What the engine costs: step times of recipes against DDP and computing alone, 4 ranks on loopback, interleaved.

torchrun --nproc-per-node 4 benchmarks/overhead.py [RECIPE ...] [--rounds 6] [--steps 6] [--json FILE]

`added_of_ddp` is the processor time that a recipe adds to computing alone, over what DDP adds to it in the same run.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import gossamer
from gossamer.workloads.transformer import Transformer


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=["allreduce", "terngrad"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = ["compute", "ddp", *args.recipes]
    steps = {n: contender(n) for n in names}
    times: dict[str, list[float]] = {n: [] for n in names}
    cpu: dict[str, list[float]] = {n: [] for n in names}  # of this rank; steadier than the clock on a shared machine
    for r in range(args.rounds + 2):
        for name in names:
            dist.barrier()
            for _ in range(args.steps):
                begin, used = time.perf_counter(), time.process_time()
                steps[name]()
                if r > 1:  # the first rounds compile and warm up
                    times[name].append(time.perf_counter() - begin)
                    cpu[name].append(time.process_time() - used)
    if dist.get_rank() == 0:
        medians = {n: 1000 * statistics.median(t) for n, t in times.items()}
        used = {n: 1000 * statistics.median(t) for n, t in cpu.items()}
        rows = [
            {
                "recipe": n,
                "step_ms": round(m, 1),
                "cpu_ms": round(used[n], 1),
                "added_of_ddp": round((used[n] - used["compute"]) / (used["ddp"] - used["compute"]), 2),
                "low_ms": round(1000 * min(times[n]), 1),
                "high_ms": round(1000 * max(times[n]), 1),
                "ratio_to_ddp": round(m / medians["ddp"], 3),
                "ratio_to_compute": round(m / medians["compute"], 3),
            }
            for n, m in medians.items()
        ]
        for row in rows:
            print(json.dumps(row))
        if args.json:
            args.json.write_text(json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1))
    dist.barrier()
    os._exit(0)


main()
