"""Measures what a plan asks of GPUs: copies to and from the host, the rate of memory, recipes' work, and all-reduces."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

from gossamer.bench.compare.calibrate import SIZES, Figure, all_reduce_seconds, waits_for
from gossamer.bench.compare.control_group import ControlGroup
from gossamer.core.errors import PeerError
from gossamer.core.verbs import AllReduce
from gossamer.costs import Cluster, Hosts, crossing_of
from gossamer.costs.cluster import FARTHEST, INSIDE, NEAR, WorkTable
from gossamer.costs.quantities import say_rate, say_seconds, say_size
from gossamer.fabrics.torch.nccl import card_of, shared_card
from gossamer.planning.plan import LINE_UP
from gossamer.planning.work import MeasuredWork
from gossamer.planning.work_tables import measure_tables

COPIED = 256 * 2**20  # bytes: of 64 MiB, a launch is a quarter of the time
REPEATS = 7


@dataclass(frozen=True)
class GpuCalibration:
    """What was measured: bytes per second of copies, seconds of all-reduces by bytes, and tables of work."""

    nodes: int
    ranks_per_node: int
    down: Figure
    up: Figure
    memory: Figure
    all_reduces: Mapping[int, Figure]
    work: Mapping[str, WorkTable]

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def latency(self) -> float:
        """Seconds of a message between hosts: so long that the shortest all-reduce takes in a plan what it took here."""
        shortest, host = min(self.all_reduces), Hosts(count=self.nodes, ranks=self.ranks_per_node)
        wire = torch.empty(shortest // 4, dtype=torch.float32, device="meta")
        asked = crossing_of(AllReduce(wire), 0, Cluster(hosts=(host,), backend="nccl"), self.size)
        took, near = self.all_reduces[shortest].value, asked.messages - asked.between
        found = took / (asked.between + NEAR * near)
        return max(found, (took - FARTHEST * near) / asked.between) if asked.between else found

    @property
    def rate(self) -> float:
        """Bytes per second of a rank in a ring, from the longest all-reduce."""
        longest, shortest = (self.all_reduces[pick(self.all_reduces)].value for pick in (max, min))
        return 2 * (self.size - 1) / self.size * max(self.all_reduces) / max(longest - shortest, 1e-9)

    def cluster(self) -> Cluster:
        alone = self.nodes == 1
        host = Hosts(
            count=self.nodes,
            ranks=self.ranks_per_node,
            up=self.rate,
            latency=self.latency,
            inside=self.rate if alone else INSIDE["gpu"],
            device="gpu",
            memory_rate=self.memory.value,
        )
        measured = ("rate", "latency", "memory_rate", "efficiency", *(["inside"] if alone else []))
        return Cluster(
            hosts=(host,),
            name="measured",
            backend="nccl",
            payload=1.0,  # the rate is one of our bytes
            efficiency={"ring": 1.0, "pairs": 1.0, "one": 1.0, "shared": 1.0},
            byte_seconds=0.0,
            program_seconds=1e-4,
            sources={"inside": "default"} | dict.fromkeys(measured, "measured"),
            work=self.work,
        )

    def rows(self) -> list[tuple[str, str, float]]:
        """Each figure in words, with its spread."""
        copies = (("copies down", self.down), ("copies up", self.up), ("memory", self.memory))
        return [
            ("ranks", f"{self.size}, {self.ranks_per_node} on a host", 0.0),
            *((name, say_rate(figure.value), figure.spread) for name, figure in copies),
            *((f"all-reduce of {say_size(n)}", say_seconds(f.value), f.spread) for n, f in self.all_reduces.items()),
            ("work", f"of {len(self.work)} recipes", 0.0),
        ]


def calibrate_gpus() -> GpuCalibration:
    """Measure on every rank's GPU and between them; rank 0's figures of its own GPU are kept."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=120))
        refuse_shared_gpus(ControlGroup(120.0).texts(card_of(device)))
        return measured_on("cuda")
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"a rank failed while GPUs were measured: {' '.join(str(error).split())[:200]}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def refuse_shared_gpus(places: Sequence[str]) -> None:
    """Raise an error if two ranks share a GPU: NCCL refuses them, and does not say why.

    >>> refuse_shared_gpus(["GPU 1 of a", "GPU 1 of b"])
    """
    if said := shared_card(dict(enumerate(places))):
        raise PeerError(f"{said}: start one rank for each GPU, with --nproc-per-node")


def measured_on(
    device: str, clock: Callable[[], float] = perf_counter, recipes: Sequence[str] = LINE_UP
) -> GpuCalibration:
    """All figures on one kind of device, with a process group that is there."""
    size = dist.get_world_size()
    if size == 1:
        raise PeerError("one rank alone has no link: start doctor --gpu --save on all ranks, with torchrun")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if size % per_node:
        raise PeerError(f"{size} ranks are not equally many on each host of {per_node}; start as many on each")
    down, up, memory = copy_rates(device, clock)

    def done() -> float:
        waits_for(device)()
        return clock()

    work = MeasuredWork(clock=done, device=device)
    return GpuCalibration(
        nodes=size // per_node,
        ranks_per_node=per_node,
        down=down,
        up=up,
        memory=memory,
        all_reduces={length: all_reduce_seconds(length // 4, device) for length in (4, *SIZES)},
        work=measure_tables(recipes, work, "gpu" if device == "cuda" else "cpu"),
    )


def copy_rates(device: str, clock: Callable[[], float], length: int = COPIED) -> tuple[Figure, Figure, Figure]:
    """Bytes per second from the device to the host, back, and of its memory, reads and writes together."""
    there = torch.zeros(length, dtype=torch.uint8, device=device)
    here = torch.zeros(length, dtype=torch.uint8, device="cpu", pin_memory=device == "cuda")
    again, wait = torch.empty_like(there), waits_for(device)

    def rate(copied: int, copy: Callable[[], object]) -> Figure:
        rates = list[float]()
        for _ in range(REPEATS + 1):
            wait()
            began = clock()
            copy()
            wait()
            rates.append(copied / max(clock() - began, 1e-9))
        return Figure.of(rates[1:])

    return (
        rate(length, lambda: here.copy_(there, non_blocking=True)),
        rate(length, lambda: there.copy_(here, non_blocking=True)),
        rate(2 * length, lambda: again.copy_(there)),
    )
