"""Beside torch's own HSDP: what gossamer's hop between replicas costs, and what it saves on a slow link.

torchrun --nproc-per-node 4 benchmarks/hsdp.py
gossamer lab --hosts 2 --per-host 2 --rate 200mbit -- python benchmarks/hsdp.py qsgd topk

Two replicas of two shards (of the host's ranks, in the lab). `none` shards and sends nothing between replicas, `native` is
FSDP2's own all-reduce. A step's milliseconds are the median over rounds of the slowest rank's, and rounds of all ways take
turns. The last lines give each way's step over native's, and its added time (over `none`) over native's.
"""

import argparse
import os
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.bench.workloads.transformer import Transformer

NONE, NATIVE = "none", "native"


class Way:
    """A model sharded and averaged in one way."""

    def __init__(self, name: str, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.name, self.model = name, Transformer()
        mine = mesh if name == NATIVE else mesh["shard"]
        for block in self.model.layers:
            fully_shard(block, mesh=mine)
        fully_shard(self.model, mesh=mine)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        sends = name not in (NONE, NATIVE)
        self.comm: Any = (
            gossamer.attach(self.model, self.optimizer, name, mesh["replicate"]) if sends else nullcontext()
        )
        self.seconds = list[float]()

    def round(self, steps: int) -> None:
        batch = torch.randint(2048, (2, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(batch).backward()
            self.optimizer.step()
        mine = torch.tensor([time.perf_counter() - began])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        self.seconds.append(float(mine) / steps)

    @property
    def step(self) -> float:
        """The first round compiles and warms up."""
        return 1000 * statistics.median(self.seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["allreduce"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    shards = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    shards = shards if shards < size else 2
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("replicate", "shard"))
    ways = [Way(name, mesh) for name in dict.fromkeys([NONE, NATIVE, *args.recipes])]
    for _ in range(args.rounds + 1):
        for way in ways:
            way.round(args.steps)
    if dist.get_rank() == 0:
        none, native = ways[0].step, ways[1].step
        for way in ways:
            added = (way.step - none) / (native - none)
            print(
                f"{way.name:28} step {way.step:7.1f} ms, {way.step / native:.3f} of native; added {added:.3f} of native's"
            )
    for way in ways:
        if way.name not in (NONE, NATIVE):
            way.comm.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
