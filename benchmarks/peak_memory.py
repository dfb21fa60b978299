"""Peak memory beside what a plan says: one recipe of each class, two ranks on loopback, a model of 100 MB.

python benchmarks/peak_memory.py [RECIPE ...] [--width 1600] [--layers 10] [--steps 6] [--shards 2]

Every recipe has processes of its own, forks of this one. A rank makes its model and optimizer, takes two steps, and then resets
the kernel's mark of its largest resident set; what it holds at most in the steps after that, less what it held before the model was
made, is the measured peak. The plan's is that of `gossamer plan`: model, gradients and momenta, what the recipe keeps, and what a
step needs besides. The bar: within 10 %. With `--shards` FSDP2 cuts the model, layer by layer, and two replicas are averaged;
`compute` is then FSDP2's own average of both.
"""

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer.costs import from_flags
from gossamer.planning.baselines import sharded
from gossamer.planning.measured_model import untrained
from gossamer.planning.plan import prepare
from gossamer.planning.work import NoWork

RECIPES = (
    "compute", "allreduce", "bf16", "qsgd", "terngrad", "topk", "powersgd", "diana", "ef21", "local_sgd(2)", "slowmo(2)",
    "overlap_local_sgd(2)", "streaming_diloco(2, delay=1)", "sgp", "osgp",
)  # fmt: skip
BAR = 0.1
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
MEGABYTE = 1e6


def held(field: str) -> float:
    """Bytes: VmRSS is what this process holds now, VmHWM the most since the mark was reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024.0 * int(found[1])


def small_model(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def cut(model: nn.Sequential, shards: int) -> None:
    """Shard each layer by itself, in two replicas; a model of one shard stays whole."""
    if shards == 1:
        return
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)


def train(kind: str, args: argparse.Namespace) -> float:
    """The peak of this rank in bytes, without what the interpreter and its libraries took before."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm = small_model(8, 2)  # kernels are compiled with a model of its own
    cut(warm, args.shards)
    optimizer = torch.optim.SGD(warm.parameters(), lr=0.01, momentum=0.9)
    comm = None if kind == "compute" else gossamer.attach(warm, optimizer, kind)
    for _ in range(args.steps):
        step(warm, optimizer, 8)
    if comm is not None:
        comm.finish()
        comm.detach()
    before = held("VmRSS")
    model = small_model(args.width, args.layers)
    cut(model, args.shards)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    comm = None if kind == "compute" else gossamer.attach(model, optimizer, kind)
    for taken in range(args.steps):
        if taken == 2:
            Path("/proc/self/clear_refs").write_text("5")
        step(model, optimizer, args.width)
    peak = held("VmHWM") - before
    if comm is not None:
        comm.finish()
    return peak


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()


def planned(kind: str, args: argparse.Namespace) -> float:
    cluster = from_flags(nodes=2, ranks=args.shards, rate=1e9)
    with torch.device("meta"):
        model = untrained(small_model(args.width, args.layers), 0.1, name="layers", memory_rate=cluster.memory_rate)
    model = replace(model, momenta=1)
    mine = sharded(model, cluster, args.shards) if args.shards > 1 else model
    if kind == "compute":
        return mine.training_bytes + mine.gathered
    return prepare(kind, mine, cluster, NoWork(), args.shards).memory.peak


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def forked(work: Callable[[], float]) -> Callable[[], float]:
    """Start the work in a fork of this process, which has imported all that it needs; the answer waits for its figure."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)

    def wait() -> float:
        with os.fdopen(reader) as said:
            return float(said.read() or "nan")

    return wait


def measured(kind: str, args: argparse.Namespace) -> float:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(2 * args.shards)}

    def rank(number: int) -> float:
        os.environ |= place | {"RANK": str(number)}
        return train(kind, args)

    ranks = [forked(partial(rank, number)) for number in range(2 * args.shards)]
    return max(wait() for wait in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    if (
        os.environ.get(THRESHOLD) != "65536"
    ):  # so that what is freed goes back to the system; it is read when a process begins
        os.execve(
            sys.executable, [sys.executable, *sys.argv], os.environ | {THRESHOLD: "65536", "OMP_NUM_THREADS": "1"}
        )
    torch.set_num_threads(1)
    for kind in args.recipes:
        found, said = measured(kind, args), forked(partial(planned, kind, args))()
        word = "met" if abs(said / found - 1) <= BAR else "not met"
        print(
            f"{kind:30} measured {found / MEGABYTE:6.0f} MB, planned {said / MEGABYTE:6.0f}: {said / found - 1:+.1%} {word}",
            flush=True,
        )


if __name__ == "__main__":
    main()
