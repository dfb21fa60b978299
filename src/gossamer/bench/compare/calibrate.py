"""Measures a cluster on the ranks that a launcher has started, and says how sure each figure is."""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from time import perf_counter, process_time
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.bench.compare.load import busy_seconds, cores
from gossamer.core.errors import PeerError
from gossamer.costs import Cluster, Hosts, severity
from gossamer.costs.cluster import INSIDE, WorkTable
from gossamer.costs.quantities import say_rate, say_seconds
from gossamer.costs.severity import two_digits
from gossamer.planning.plan import LINE_UP
from gossamer.planning.work import MeasuredWork
from gossamer.planning.work_tables import measure_tables

LONGEST = 0.5  # seconds of one measurement: a larger message would take minutes on a slow link
LEAST, MOST, BUDGET = 7, 20, 2.0  # times that each is measured, and the seconds after which it is enough
SIZES = [2**e for e in range(16, 25, 2)]  # bytes, up to 16 MiB
PAYLOAD = 0.956  # of a wire's bytes that are ours, in frames of 1500 bytes
ALIKE = 1.15  # hosts whose rates differ by less are one group
FOREIGN = 0.3  # cores that others use, above which figures are upper bounds


@dataclass(frozen=True)
class Figure:
    """A median over repetitions, and half of the range of their middle half, relative to it."""

    value: float
    spread: float

    @staticmethod
    def of(times: Sequence[float]) -> "Figure":
        low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        return Figure(middle, (high - low) / 2 / middle if middle else 0.0)


@dataclass(frozen=True)
class Calibration:
    """What was measured: seconds of a message, bytes per second of each rank's link, and shares of it that patterns reach."""

    size: int
    latency: Figure
    links: tuple[float, ...]
    link_spread: float
    ring: Figure
    pairs: Figure
    shared: Figure
    byte_seconds: float
    ranks_per_machine: int
    cores: int
    foreign: float  # cores that other programs used meanwhile
    work: Mapping[str, WorkTable] = field(default_factory=dict[str, WorkTable])

    def cluster(self) -> Cluster:
        """The cluster: one group of hosts, or one for each rank where links differ."""
        share = self.cores / self.ranks_per_machine
        alike = max(self.links) <= ALIKE * min(self.links)
        links = [(self.size, min(self.links))] if alike else [(1, link) for link in self.links]
        hosts = [
            Hosts(
                count=count,
                up=link / PAYLOAD,
                latency=self.latency.value,
                inside=INSIDE["cpu"],  # not measured: one rank a host was there
                cores=share,
                memory_rate=copy_rate(),
            )
            for count, link in links
        ]
        measured = ("rate", "latency", "cores", "efficiency", "byte_seconds", "memory_rate")
        return Cluster(
            hosts=tuple(hosts),
            name="measured",
            payload=PAYLOAD,
            efficiency={
                "ring": _share(self.ring.value),
                "pairs": _share(self.pairs.value),
                "one": 1.0,
                "shared": _share(self.shared.value),
            },
            byte_seconds=self.byte_seconds,
            sources={"inside": "default"} | dict.fromkeys(measured, "measured"),
            work=self.work,
        )

    def rows(self) -> list[tuple[str, str, float]]:
        """Each figure in words, with its spread."""
        shares = (("ring", self.ring), ("pairs", self.pairs), ("two rings at once", self.shared))
        rows = [
            ("ranks", f"{self.size}, {self.ranks_per_machine} on a machine of {self.cores} cores", 0.0),
            ("a message", say_seconds(self.latency.value), self.latency.spread),
            ("links", ", ".join(dict.fromkeys(map(say_rate, self.links))), self.link_spread),
            *((name, f"{figure.value:.0%} of a link", figure.spread) for name, figure in shares),
            ("severity", say_severity(severity(10**6, min(self.links), 1.0)), self.link_spread),
            ("a byte's processor time", f"{1e9 * self.byte_seconds:.2f} ns, sent or received", 0.0),
            ("work", f"of {len(self.work)} recipes, on all ranks of a machine at once", 0.0),
        ]
        if self.foreign > FOREIGN:
            much = f"used {self.foreign:.1f} cores meanwhile: take seconds as upper bounds, or measure again"
            rows.append(("other programs", much, 0.0))
        return rows


def say_severity(of_a_million: float) -> str:
    return f"{two_digits(of_a_million)} for each million parameters, over the seconds that a step computes"


def _share(value: float) -> float:
    return min(max(round(value, 3), 0.01), 1.0)


def calibrate() -> Calibration:
    """Measure between all ranks; every rank gets the same figures."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        if dist.get_world_size() == 1:
            raise PeerError(
                "one rank alone has no link: start doctor --save on all ranks, with torchrun or gossamer lab"
            )
        return _measured()
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"a rank failed while links were measured: {' '.join(str(error).split())[:200]}") from error
    finally:
        dist.destroy_process_group()


def _measured() -> Calibration:
    began, busy, mine = perf_counter(), busy_seconds(), process_time()
    rank, size = dist.get_rank(), dist.get_world_size()
    hosts = _gathered(_host())
    if len(set(hosts)) < size:
        raise PeerError(
            f"{size} ranks are on {len(set(hosts))} hosts: start doctor --save with one rank on each host, and write how many "
            "there will be into the file, as ranks = 8"
        )
    latency = Figure.of([t / 2 for t in _times(lambda: _ping(rank, size), most=50)])
    links, spread = _links(rank, size, latency.value)
    slowest = min(links)
    waits = 2 * (size - 1) * latency.value
    ring, byte_seconds = _ring(size, slowest, waits)
    pairs = _relative(lambda wire: _pairs(rank, size, wire), slowest / (size - 1), waits / 2)
    groups: list[Any] = [dist.new_group(), dist.new_group()]  # pyright: ignore[reportUnknownMemberType]
    crossed = 2 * 2 * (size - 1) / size
    shared = _relative(lambda wire: _two_rings(wire, groups), slowest / crossed, waits)
    torch.set_num_threads(1)
    work = measure_tables(LINE_UP, MeasuredWork())  # on all ranks of a machine at once, as in a step
    dist.barrier()
    machines = _gathered(_machine())
    passed = perf_counter() - began
    ours = zip(_gathered(process_time() - mine), machines, strict=True)
    foreign = _by_others(busy_seconds() - busy, ours, machines[rank]) / passed
    return Calibration(
        size=size,
        latency=latency,
        links=tuple(links),
        link_spread=spread,
        ring=ring,
        pairs=pairs,
        shared=shared,
        byte_seconds=byte_seconds,
        ranks_per_machine=max(machines.count(m) for m in machines),
        cores=cores(),
        foreign=max(_gathered(foreign)),
        work=work,
    )


def _by_others(busy: float, ours: Iterable[tuple[float, float]], here: float) -> float:
    """Processor seconds of a machine's other programs; `ours` are those of each rank, with the machine that it is on.

    >>> _by_others(10.0, [(3.0, 1.0), (3.0, 1.0), (3.0, 2.0), (3.0, 2.0)], here=1.0)
    4.0
    """
    return max(busy - sum(seconds for seconds, machine in ours if machine == here), 0.0)


# -- one measurement -------------------------------------------------------------------------------------------------------


def _times(act: Callable[[], None], most: int = MOST) -> list[float]:
    """Seconds of an action, each that of the slowest rank, until there are enough of them."""
    out, began = list[float](), perf_counter()
    act()
    while len(out) < most and (len(out) < LEAST or _agreed(perf_counter() - began) < BUDGET):
        dist.barrier()
        start = perf_counter()
        act()
        out.append(_agreed(perf_counter() - start))
    return out


def _agreed(seconds: float) -> float:
    """The largest of all ranks."""
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _ping(rank: int, size: int) -> None:
    """A byte to the next rank and one from the rank before, twice."""
    for _ in range(2):
        _both(torch.zeros(1, dtype=torch.uint8), (rank + 1) % size, (rank - 1) % size)


def _both(wire: Tensor, to: int, source: int) -> None:
    came = torch.empty_like(wire)
    sending = dist.isend(wire, to)
    dist.recv(came, source)
    if sending is not None:
        sending.wait()


def _links(rank: int, size: int, latency: float) -> tuple[list[float], float]:
    """Bytes per second that each rank sends to the next while nobody else sends, and the largest spread."""
    rates, spread = list[float](), 0.0
    for sender in range(size):
        to = (sender + 1) % size

        def one_way(wire: Tensor, sender: int = sender, to: int = to) -> None:
            if rank == sender:
                dist.send(wire, to)
                dist.recv(torch.empty(1, dtype=torch.uint8), to)  # the kernel has the bytes before they are there
            elif rank == to:
                dist.recv(torch.empty_like(wire), sender)
                dist.send(torch.zeros(1, dtype=torch.uint8), sender)

        length, found = _long_enough(one_way, 2 * latency)
        rates.append(length / max(found.value - 2 * latency, 1e-9))
        spread = max(spread, found.spread)
    return rates, spread


def _long_enough(act: Callable[[Tensor], None], waits: float) -> tuple[int, Figure]:
    """The longest message whose bytes take no longer than `LONGEST`, beside the seconds of messages in a row, and its seconds."""
    length, found = SIZES[0], Figure(0.0, 0.0)
    for length in SIZES:
        wire = torch.zeros(length, dtype=torch.uint8)
        act(wire)
        dist.barrier()
        start = perf_counter()
        act(wire)
        if _agreed(perf_counter() - start) - waits > LONGEST / 4:
            break
    wire = torch.zeros(length, dtype=torch.uint8)
    found = Figure.of(_times(lambda: act(wire)))
    return length, found


def _ring(size: int, slowest: float, waits: float) -> tuple[Figure, float]:
    """The share of the slowest link's rate that an all-reduce reaches, and the processor seconds of a byte, sent or received."""
    used = list[float]()

    def reduce(wire: Tensor) -> None:
        began = process_time()
        dist.all_reduce(wire)
        used.append(process_time() - began)

    length, found = _long_enough(reduce, waits)
    crossed = 2 * (size - 1) / size * length
    per_byte = _agreed(statistics.median(used[-LEAST:])) / (2 * crossed)
    return Figure(min(crossed / _without(found.value, waits) / slowest, 1.0), found.spread), per_byte


def all_reduce_seconds(elements: int, device: str = "cpu") -> Figure:
    """Seconds of an all-reduce of so many float32 elements, those of the slowest rank."""
    x, wait = torch.zeros(elements, dtype=torch.float32, device=device), waits_for(device)

    def reduce() -> None:
        dist.all_reduce(x)
        wait()

    return Figure.of(_times(reduce, most=LEAST))


def waits_for(device: str) -> Callable[[], None]:
    """What waits until a device has done all that it was asked."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def _relative(act: Callable[[Tensor], None], full: float, waits: float) -> Figure:
    """The share of the slowest link's rate that a pattern reaches; `full` is the rate of a wire if it reached all of it."""
    length, found = _long_enough(act, waits)
    return Figure(min(length / _without(found.value, waits) / full, 1.0), found.spread)


def _without(seconds: float, waits: float) -> float:
    """Seconds without those of messages in a row, which may have been measured in a busier moment."""
    return max(seconds - waits, seconds / 2)


def _pairs(rank: int, size: int, wire: Tensor) -> None:
    for hop in range(1, size):
        _both(wire, (rank + hop) % size, (rank - hop) % size)


def _two_rings(wire: Tensor, groups: Sequence[Any]) -> None:
    flights = [dist.all_reduce(wire.clone(), group=group, async_op=True) for group in groups]
    for flight in flights:
        if flight is not None:
            flight.wait()


# -- the machine -----------------------------------------------------------------------------------------------------------


def copy_rate() -> float:
    """Bytes per second of a copy, reads and writes together."""
    source = torch.zeros(8 * 2**20, dtype=torch.float32)
    into, times = torch.empty_like(source), list[float]()
    for _ in range(5):
        began = perf_counter()
        into.copy_(source)
        times.append(perf_counter() - began)
    return 2 * 4 * source.numel() / min(times)


def _machine() -> float:
    """A number that all ranks of a machine share, those of a lab's hosts too."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return float(crc32((path.read_text() if path.exists() else os.uname().nodename).encode()))


def _host() -> float:
    """A number that all ranks behind one network card share."""
    path = Path("/proc/self/ns/net")
    return float(crc32(f"{_machine()} {path.stat().st_ino if path.exists() else 0}".encode()))


def _gathered(value: float) -> list[float]:
    mine = torch.tensor([value], dtype=torch.float64)
    all = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all, mine)
    return [float(each) for each in all]
