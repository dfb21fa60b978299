"""The links of a simulation, and the seconds that a request takes on them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.core.verbs import AllReduce
from gossamer.costs.crossing import traffic
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

    def node_of(self, rank: int) -> int:
        return rank // self.per_node

    def rate_of(self, rank: int) -> float:
        return self.rate[self.node_of(rank)] if isinstance(self.rate, tuple) else self.rate

    def seconds(self, verbs: Sequence[Collective], ranks: Sequence[int], size: int) -> float:
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
