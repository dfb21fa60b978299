"""The links of a simulation, and the seconds that a request takes on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from gossamer.core.verbs import AllReduce
from gossamer.costs import Cluster, Hosts
from gossamer.costs.crossing import Crossing, crossing_of, traffic
from gossamer.costs.events import EventClock, RequestTime
from gossamer.fabrics.collectives import Collective


@dataclass(frozen=True)
class Network:
    """Links with a latency (seconds) and a rate (bytes per second, one for all nodes or one for each).

    `per_node` ranks share a node's link; traffic between them has the rate `inside` and no latency.
    """

    latency: float = 0.0
    rate: float | tuple[float, ...] = float("inf")
    per_node: int = 1
    inside: float = float("inf")

    start: float = field(default=0.0, init=False)  # seconds to start a program on a comm thread

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def work(self, rank: int, label: str, piece: int) -> float:
        """Processor seconds of a program before its k-th request, or after its last: none."""
        return 0.0

    def message(self, length: int, sender: int, to: int, when: RequestTime) -> tuple[float, float]:
        """Seconds that the sender's link is busy with a message, and those until it arrives after that."""
        if self.node_of(sender) == self.node_of(to):
            return length / self.inside, 0.0
        return length / min(self.rate_of(sender), self.rate_of(to)), self.latency

    def rate_of(self, rank: int) -> float:
        return self.rate[self.node_of(rank)] if isinstance(self.rate, tuple) else self.rate

    def seconds(self, verbs: Sequence[Collective], ranks: Sequence[int], size: int, when: RequestTime) -> float:
        """Seconds of a collective once all ranks have reached it: the latencies, and the slowest link's transfer time."""
        hops = 0 if len({*map(self.node_of, ranks)}) < 2 else len(ranks) - 1
        crossed = max(self._crossing(verbs, ranks, size), default=0.0)
        return self.latency * (2 * hops if isinstance(verbs[0], AllReduce) else hops) + crossed

    def _crossing(self, verbs: Sequence[Collective], ranks: Sequence[int], size: int) -> list[float]:
        """Seconds that each link is busy: the links between nodes, and those of ranks within a node."""
        sent, received, inside = Counter[int](), Counter[int](), list[float]()
        moved = [traffic(v, r, size, self.per_node) for v, r in zip(verbs, ranks, strict=True)]
        kept = Counter[int]()  # bytes received by a node that were sent within it
        for rank, t in zip(ranks, moved, strict=True):
            sent[rank // self.per_node] += t.sent - t.inside
            received[rank // self.per_node] += t.received
            kept[rank // self.per_node] += t.inside
            inside.append(t.inside / self.inside)
        nodes = {self.node_of(r): self.rate_of(r) for r in ranks}
        return inside + [max(sent[n], received[n] - kept[n]) / rate for n, rate in nodes.items()]


@dataclass(frozen=True)
class ClusterLinks:
    """The links and processors of a cluster.

    `pieces` holds, for a program by its label, the processor seconds before each of its requests and after its last. The
    ranks of a host share its cores, all of them at work. `events` are those of one run, `in_force` the
    pieces of ranks whose controller has put another recipe in force.
    """

    cluster: Cluster
    pieces: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    events: EventClock = field(default_factory=EventClock)
    in_force: dict[int, Mapping[str, Sequence[float]]] = field(default_factory=dict[int, Mapping[str, Sequence[float]]])

    @property
    def per_node(self) -> int:
        return self.cluster.ranks_per_node

    @property
    def start(self) -> float:
        return self.cluster.program_seconds

    @property
    def latency(self) -> float:
        return self.cluster.latency

    @cached_property
    def _hosts(self) -> list[Hosts]:
        return [hosts for hosts in self.cluster.hosts for _ in range(hosts.count)]

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def host_of(self, rank: int) -> Hosts:
        return self._hosts[self.node_of(rank)]

    def slowdown(self, rank: int) -> float:
        """How many times as long a rank computes on its host as alone on a core of speed 1."""
        host = self.host_of(rank)
        return max(1.0, host.ranks / host.shared_cores) / host.speed

    def work(self, rank: int, label: str, piece: int) -> float:
        """Processor seconds of a program before its k-th request, or after its last."""
        pieces = self.in_force.get(rank, self.pieces).get(label, ())
        return pieces[piece] * self.slowdown(rank) if piece < len(pieces) else 0.0

    def message(self, length: int, sender: int, to: int, when: RequestTime) -> tuple[float, float]:
        """Seconds that the sender's link is busy with a message, and those until it arrives after that."""
        if self.node_of(sender) == self.node_of(to):
            return length / self.host_of(sender).inside, self.cluster.latency_inside
        down = self.host_of(to)
        cards = [
            (self._mates(sender), self.host_of(sender).up),
            (self._mates(to), down.up if down.down is None else down.down),
        ]
        reached = self.cluster.payload * self.cluster.reaches("one")
        late = self.events.lateness(sender, 1, when)
        return self.events.transfer_seconds(length, cards, reached, when.clock), self.latency + late

    def seconds(self, verbs: Sequence[Collective], ranks: Sequence[int], size: int, when: RequestTime) -> float:
        """Seconds of a collective once all ranks have reached it: as planned for the first rank of each node."""
        firsts = {self.node_of(r): (r, v) for r, v in reversed([*zip(ranks, verbs, strict=True)])}
        crossings = {r: crossing_of(v, r, self.cluster, size) for r, v in firsts.values()}
        late = max(c.latency_seconds(self.cluster) for c in crossings.values())
        again = max(self.events.lateness(rank, self._leaving(c), when) for rank, c in crossings.items())
        taken = list[float]()
        for rank, c in crossings.items():
            host, reached = self.host_of(rank), self.cluster.payload * self.cluster.reaches(c.pattern)
            cards = [(self._mates(rank), host.slowest_rate)]
            card = self.events.transfer_seconds(c.card, cards, reached, when.clock)
            taken += [card, c.inside / host.inside, 2 * c.sent * self.cluster.byte_seconds]
        return late + again + max(taken)

    def _leaving(self, crossing: Crossing) -> int:
        """Messages that leave a node: one rank's of a ring, and those of all its ranks where pairs exchange."""
        return crossing.between * (self.per_node if crossing.pattern == "pairs" else 1)

    def _mates(self, rank: int) -> range:
        """The ranks of a rank's node, which share its card."""
        first = self.node_of(rank) * self.per_node
        return range(first, first + self.per_node)
