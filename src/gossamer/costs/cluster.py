"""A cluster: groups of equal hosts, their links and processors, and what a byte costs on the way."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Literal

from gossamer.core.errors import CostError
from gossamer.costs.laws import ComputingLaw, Constant, SlowRank, Trace
from gossamer.costs.quantities import Price

MOST_RANKS = 2**20
Backend = Literal["gloo", "nccl"]
Device = Literal["cpu", "gpu"]
Pattern = Literal["ring", "pairs", "one"]


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Equal hosts. Rates are bytes per second on the wire; `latency` is that of one message, software included."""

    count: int
    ranks: int = 1  # on each host; they share its network card
    up: float = inf
    down: float | None = None  # as `up`, unless given
    latency: float = 0.0
    inside: float = inf  # between two ranks of a host
    cores: float = inf  # that the ranks of a host share
    device: Device = "cpu"
    speed: float = 1.0  # of computing, relative to the machine that the model was timed on
    memory: float | None = None  # bytes a rank may use
    memory_rate: float = 10e9  # bytes per second of a copy, reads and writes together
    price: Price | None = None  # of a host, an hour
    egress: Price | None = None  # of what a host sends, a gigabyte
    mtbf: float | None = None  # seconds between two failures of a host

    def __post_init__(self) -> None:
        for name, least in (("count", 1), ("ranks", 1)):
            if getattr(self, name) < least:
                raise CostError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("up", "inside", "cores", "speed", "memory", "memory_rate", "mtbf"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise CostError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.speed == inf:
            raise CostError("speed must be a number of times, not inf")
        if self.latency < 0:
            raise CostError(f"latency must be 0 or more, not {self.latency}")

    @property
    def slowest_rate(self) -> float:
        return min(self.up, self.up if self.down is None else self.down)

    @property
    def shared_cores(self) -> float:
        """The cores on which its ranks compute; those on GPUs wait for none."""
        return inf if self.device == "gpu" else self.cores


@dataclass(frozen=True)
class WorkTable:
    """Processor seconds of a recipe's program on a bucket of so many bytes: a row for each number of `ranks`, with the seconds
    before and within each request, and those after the last.
    """

    bytes: int
    ranks: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    device: Device = "cpu"

    def __post_init__(self) -> None:
        if self.bytes < 1:
            raise CostError(f"bytes must be at least 1, not {self.bytes}")
        if not self.ranks or min(self.ranks) < 2 or sorted({*self.ranks}) != [*self.ranks]:
            raise CostError(f"ranks must be whole numbers of 2 or more that rise, not {[*self.ranks]}")
        if len(self.seconds) != len(self.ranks) or any(not row or len(row) % 2 for row in self.seconds):
            raise CostError("seconds must have a row for each of ranks, with two numbers for each request and two more")
        if any(not 0 <= x < inf for row in self.seconds for x in row):
            raise CostError("seconds must be 0 or more")


EFFICIENCY: Mapping[Backend, Mapping[str, float]] = {
    "gloo": {"ring": 0.96, "pairs": 0.88, "one": 0.95, "shared": 0.75},
    "nccl": {"ring": 0.85, "pairs": 0.85, "one": 0.85, "shared": 0.85},
}
"""The share of a link's rate that a pattern of messages reaches. Those of gloo were measured on loopback links shaped to 50 to
1000 Mbit/s; those of nccl, over TCP sockets, are not measured.
"""

MEMORY_RATES: Mapping[Device, float] = {"cpu": 10e9, "gpu": 600e9}
"""Bytes per second of a copy, reads and writes together, where none are given."""

LATENCIES: Mapping[Device, float] = {"cpu": 100e-6, "gpu": 30e-6}
INSIDE: Mapping[Device, float] = {"cpu": 5e9, "gpu": 20e9}
"""Seconds of a message between hosts, and bytes per second between two ranks of a host, where none are given."""

NEAR, FARTHEST = 0.1, 20e-6  # latency inside a host: a share of that between hosts, and at most so many seconds

COMM_THREADS: Mapping[Backend, Mapping[str, Any]] = {
    "gloo": {"byte_seconds": 6e-10, "program_seconds": 3e-4},
    "nccl": {"byte_seconds": 0.0, "program_seconds": 1e-4},
}
"""What comm threads take of a processor for a byte and for a program, where it is not given: over NCCL, bytes take none."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything that the seconds of a step depend on, besides the model and the recipe.

    `payload` is the share of a wire's bytes that are ours: 1448 of 1514 in a TCP frame. `byte_seconds` is the processor time of a
    byte, sent or received, on the comm thread. `sources` says where figures come from: "measured", "file", "flag" or "default".
    """

    hosts: tuple[Hosts, ...]
    name: str = ""
    backend: Backend = "gloo"
    payload: float = 0.956
    efficiency: Mapping[str, float] = field(default_factory=dict[str, float])
    byte_seconds: float = 6e-10
    law: ComputingLaw = Constant()  # of computing
    program_seconds: float = 3e-4  # to start a program on a comm thread and join it
    restart: float = 120.0  # seconds from a failure until training goes on
    checkpoint: float = 20.0  # seconds of a save
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    work: Mapping[str, WorkTable] = field(default_factory=dict[str, WorkTable])  # by recipe

    def __post_init__(self) -> None:
        if not self.hosts:
            raise CostError("a cluster needs at least one group of hosts")
        if self.size > MOST_RANKS:
            raise CostError(f"{self.size:,} ranks are too many to plan; at most {MOST_RANKS:,}")
        if len({h.ranks for h in self.hosts}) > 1:
            raise CostError("groups of hosts have different numbers of ranks, which is not planned; give all the same")
        if len({p.currency for h in self.hosts for p in (h.price, h.egress) if p}) > 1:
            raise CostError("prices are in two currencies; give all in one")
        if isinstance(self.law, SlowRank) and not 0 <= self.law.rank < self.size:
            raise CostError(f"rank {self.law.rank} is to be slow, and ranks are numbered from 0 to {self.size - 1}")
        if not 0 < self.payload <= 1 or not all(0 < e <= 1 for e in self.efficiency.values()):
            raise CostError("payload and efficiency must lie between 0 and 1")

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return sum(h.count * h.ranks for h in self.hosts)

    @cached_property
    def nodes(self) -> int:
        return sum(h.count for h in self.hosts)

    @cached_property
    def ranks_per_node(self) -> int:
        return self.hosts[0].ranks

    @cached_property
    def rate(self) -> float:
        """The rate of the slowest link, which a collective of all ranks waits for."""
        return min(h.slowest_rate for h in self.hosts)

    @cached_property
    def latency(self) -> float:
        return max(h.latency for h in self.hosts)

    @cached_property
    def latency_inside(self) -> float:
        """Seconds of a message between two ranks of a host."""
        return NEAR * self.latency if self.nodes == 1 else min(NEAR * self.latency, FARTHEST)

    @cached_property
    def inside(self) -> float:
        return min(h.inside for h in self.hosts)

    @cached_property
    def cores(self) -> float:
        """The fewest cores on which the ranks of a host compute."""
        return min(h.shared_cores for h in self.hosts)

    @cached_property
    def turns(self) -> float:
        """The ranks of a host that take turns on one of its cores, 1 at least."""
        return max(self.ranks_per_node / self.cores, 1.0)

    @cached_property
    def memory_rate(self) -> float:
        return min(h.memory_rate for h in self.hosts)

    @cached_property
    def speed(self) -> float:
        """The slowest host's, for which all others wait."""
        return min(h.speed for h in self.hosts)

    @cached_property
    def memory(self) -> float:
        """The fewest bytes that a rank may use."""
        return min(inf if h.memory is None else h.memory for h in self.hosts)

    @cached_property
    def has_gpus(self) -> bool:
        return any(h.device == "gpu" for h in self.hosts)

    def reaches(self, pattern: str) -> float:
        """The share of a link's rate that a pattern of messages reaches."""
        return self.efficiency.get(pattern, EFFICIENCY[self.backend][pattern])

    def source(self, what: str) -> str:
        return self.sources.get(what, "default")

    def at_rate(self, rate: float) -> "Cluster":
        """The same cluster with its slowest link at this rate, and all others by the same factor."""
        if self.rate == inf:
            return replace(self, hosts=tuple(replace(h, up=rate, down=None) for h in self.hosts))
        factor = rate / self.rate
        hosts = [replace(h, up=h.up * factor, down=None if h.down is None else h.down * factor) for h in self.hosts]
        return replace(self, hosts=tuple(hosts))

    def of_nodes(self, nodes: Iterable[int]) -> "Cluster":
        """The same cluster with some of its hosts, by their numbers.

        >>> [h.count for h in from_flags(nodes=4, rate=1e6).of_nodes([0, 3]).hosts]
        [1, 1]
        """
        every, kept = [replace(hosts, count=1) for hosts in self.hosts for _ in range(hosts.count)], [*nodes]
        hosts = tuple(every[node] for node in kept)
        return replace(self, hosts=hosts, law=_law_of_nodes(self.law, kept, self.ranks_per_node))


def _law_of_nodes(law: ComputingLaw, nodes: Sequence[int], per_node: int) -> ComputingLaw:
    """The law where only these nodes are left: a slow rank is the same one by its new number, or is not there, and ranks keep
    their rows of a trace.
    """
    if isinstance(law, Trace):
        return law.of(node * per_node + place for node in nodes for place in range(per_node))
    if not isinstance(law, SlowRank):
        return law
    node, place = divmod(law.rank, per_node)
    return replace(law, rank=nodes.index(node) * per_node + place) if node in nodes else Constant()


def from_flags(
    *,
    nodes: int,
    gpus: int = 0,
    ranks: int = 1,
    rate: float = inf,
    latency: float | None = None,
    inside: float | None = None,
    cores: float | None = None,
) -> Cluster:
    """Equal hosts: with `gpus` each, one rank a GPU over NCCL; else with `ranks` on their processors over gloo.

    >>> cluster = from_flags(nodes=4, gpus=8, rate=3.125e9, latency=30e-6)
    >>> cluster.size, cluster.backend, cluster.source("inside")
    (32, 'nccl', 'default')
    """
    given = {"latency": latency, "inside": inside, "cores": cores}
    sources = {"rate": "flag"} | {name: "flag" for name, value in given.items() if value is not None}
    device: Device = "gpu" if gpus else "cpu"
    hosts = Hosts(
        count=nodes,
        ranks=gpus or ranks,
        up=rate,
        latency=LATENCIES[device] if latency is None else latency,
        inside=INSIDE[device] if inside is None else inside,
        cores=inf if gpus or cores is None else cores,
        device=device,
        memory_rate=MEMORY_RATES[device],
    )
    backend: Backend = "nccl" if gpus else "gloo"
    return Cluster(hosts=(hosts,), backend=backend, sources=sources, **COMM_THREADS[backend])
