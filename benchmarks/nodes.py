"""Several ranks behind one network card: what two levels save, in a lab of nodes.

gossamer lab --hosts 2 --rate 100mbit -- python benchmarks/nodes.py --per-node 4 [RECIPE ...] [--rounds 3] [--steps 3]

Every recipe also runs in two levels, unless it does already. `card_mb` is what a node's card sends per step, by its own
counter, and `counted_mb` what was counted beforehand.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer
from gossamer.counting import bytes_between
from gossamer.lab import own_counters
from gossamer.recipe import Recipe
from gossamer.workloads.transformer import Transformer


def start_ranks(per_node: int) -> int:
    """As torchrun does: some processes on this host, numbered host by host."""
    host, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv, "--rank"],
            env=os.environ
            | {"RANK": str(host * per_node + i), "WORLD_SIZE": str(hosts * per_node), "LOCAL_RANK": str(i)},
        )
        for i in range(per_node)
    ]
    return max(rank.wait() for rank in ranks)


def two_levels(text: str, per_node: int) -> str:
    recipe = Recipe.of(text)
    memory = "" if recipe.memory == Recipe.of("allreduce").memory else f" + {recipe.memory}"
    return f"nodes({recipe.exchange}, {per_node}){memory}"


def measure(text: str, per_node: int, rounds: int, steps: int) -> None:
    """One recipe, or computing alone."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seconds, sent = list[float](), list[int]()
    with nullcontext() if text == "compute" else gossamer.attach(model, optimizer, text):
        batch = torch.randint(2048, (2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
        for r in range(rounds + 1):
            dist.barrier()
            before, began = own_counters().sent_bytes, time.perf_counter()
            for _ in range(steps):
                optimizer.zero_grad()
                model(batch).backward()
                optimizer.step()
            mine = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if r:  # the first round compiles and warms up
                seconds.append(float(mine) / steps)
                sent.append((own_counters().sent_bytes - before) // steps)
    if dist.get_rank() == 0:
        shapes: dict[str, Tensor] = dict(model.named_parameters())
        counted = 0.0 if text == "compute" else bytes_between(text, shapes, dist.get_world_size(), per_node) / 1e6
        milliseconds, card = 1000 * statistics.median(seconds), statistics.median(sent) / 1e6
        print(f"{text:75} step {milliseconds:7.0f} ms   card_mb {card:6.2f}   counted_mb {counted:6.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=["allreduce", "terngrad", "qsgd", "topk", "powersgd"])
    parser.add_argument("--per-node", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help="set by the program itself")
    args = parser.parse_args()
    if not args.rank:
        sys.exit(start_ranks(args.per_node))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure("compute", args.per_node, args.rounds, args.steps)
    for recipe in args.recipes:
        measure(recipe, args.per_node, args.rounds, args.steps)
        if not recipe.startswith("nodes"):
            measure(two_levels(recipe, args.per_node), args.per_node, args.rounds, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
