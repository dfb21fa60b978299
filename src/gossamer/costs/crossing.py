"""The bytes of a request on a rank's link, and its seconds: messages in a row, and bytes through a node's network card.

All ranks make the same request. What one node sends is what its ranks send to other nodes together, since they share a card.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple

from gossamer.core.groups import members, place
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send, Shared, Verb
from gossamer.costs.cluster import Cluster, Pattern
from gossamer.costs.sharing import Flow

TINY = 1e-12


class Traffic(NamedTuple):
    """Bytes handed to the backend, sent and received over this rank's link, and sent within the node (`inside`)."""

    handed: int
    sent: int
    received: int
    inside: int = 0


def traffic(verb: Verb, rank: int, size: int, per_node: int = 1) -> Traffic:
    """The bytes that a request of this rank moves, with `size` ranks and `per_node` ranks per node.

    All-reduce and all-gather are counted as rings: 2 (N-1)/N of the tensor, and N-1 wires, each way. A ring sends to the
    next rank of the group; the bytes leave the node if that rank is on another node.
    """
    if not isinstance(verb, Shared):
        return Traffic(0, 0, 0)
    everyone, (index, count) = members(verb, size), place(verb, rank, size)
    mine = rank // per_node

    def stays(to: int) -> bool:
        return everyone[to] // per_node == mine

    match verb:
        case AllReduce(tensor):
            return _ring(tensor.nbytes, 2 * (count - 1) * tensor.nbytes // count, stays((index + 1) % count))
        case AllGather(wire):
            return _ring(wire.numel(), (count - 1) * wire.numel(), stays((index + 1) % count))
        case AllToAll(_, lengths):
            wires, near = verb.sent, [everyone.index(r) for r in _mates(everyone, rank, per_node)]
            sent, inside = (sum(some) - wires[index] for some in (wires, [wires[j] for j in near]))
            return Traffic(sent, sent, sum(lengths) - lengths[index], inside)
        case Send(to, wire):
            n = wire.numel()
            return Traffic(n, n, 0, n if stays(to) else 0)
        case Receive(_, length):
            return Traffic(0, 0, length)
        case _:
            return Traffic(0, 0, 0)


def _ring(handed: int, crossed: int, stays: bool) -> Traffic:
    return Traffic(handed, crossed, crossed, crossed if stays else 0)


@dataclass(frozen=True)
class Crossing:
    """What a request needs of the network: `messages` one after the other, of which `between` leave the node; bytes that this
    rank sends, that its node's card sends, and that ranks of the node send to one another.
    """

    pattern: Pattern
    messages: int = 0
    between: int = 0
    sent: float = 0.0
    card: float = 0.0
    inside: float = 0.0  # the most that one rank sends within the node

    def times(self, factor: float) -> "Crossing":
        """The same with so many times the bytes."""
        return replace(self, sent=factor * self.sent, card=factor * self.card, inside=factor * self.inside)

    def latency_seconds(self, cluster: Cluster) -> float:
        """Seconds that no rate shortens: messages follow one another, but NCCL's pairs are sent at once."""
        if self.pattern == "pairs" and cluster.backend == "nccl":
            return cluster.latency if self.between else cluster.latency_inside * min(self.messages, 1)
        return cluster.latency * self.between + cluster.latency_inside * (self.messages - self.between)

    def link_seconds(self, cluster: Cluster) -> float:
        """Seconds of the bytes, on the slower of the card and the links within the node."""
        card = self.card / (cluster.rate * cluster.payload * cluster.reaches(self.pattern))
        return max(card, self.inside / cluster.inside)

    def flow(self, cluster: Cluster) -> Flow:
        """What it takes of the card and of the links within the node while its bytes travel; full links are 1."""
        alone = self.link_seconds(cluster)
        card = self.card / (cluster.rate * cluster.payload) / alone if alone else 0.0
        within = self.inside / cluster.inside / alone if alone else 0.0
        most = max(card, within, TINY)
        return Flow(most, {"card": card / most, "inside": within / most})

    def seconds(self, cluster: Cluster) -> float:
        return self.latency_seconds(cluster) + self.link_seconds(cluster)


def crossing_of(verb: Shared, rank: int, cluster: Cluster, size: int, sharing: int = 1) -> Crossing:
    """What a request of this rank needs, in a world of `size` ranks; `sharing` such worlds share each node's card.

    >>> import torch
    >>> from gossamer.costs import Cluster, Hosts
    >>> four = Cluster(hosts=(Hosts(count=4, up=1e6, latency=1e-3),), payload=1.0, efficiency={"ring": 1.0})
    >>> round(crossing_of(AllReduce(torch.zeros(1000)), 0, four, 4).seconds(four), 6)
    0.012
    """
    per_node = max(cluster.ranks_per_node // sharing, 1)
    ranks, (index, count) = members(verb, size), place(verb, rank, size)
    mates = _mates(ranks, rank, per_node)
    nodes = _nodes(ranks, per_node)
    moved = traffic(verb, rank, size, per_node)
    match verb:
        case AllReduce():
            messages, between, pattern = _reduce_messages(cluster, count, nodes)
            card = moved.sent if nodes > 1 else 0
        case AllGather(wire):
            messages, pattern = count - 1, "ring"
            between = _ring_between(cluster, messages, nodes)
            card = (count - 1) * wire.numel() if nodes > 1 else 0
        case AllToAll():
            messages, pattern = count - 1, "pairs"
            between = messages if nodes > 1 else 0
            # All of a node send as much as this rank, but for the wires between them.
            mean = (sum(verb.sent) - verb.sent[index]) / max(count - 1, 1)
            card = len(mates) * (count - len(mates)) * mean
        case Send(to):
            messages, pattern = 1, "one"
            hop = (to - index) % count
            leaving = sum(ranks[(ranks.index(r) + hop) % count] // per_node != rank // per_node for r in mates)
            between, card = int(leaving > 0), leaving * verb.wire.numel()
        case Receive(_, length):
            leaves = nodes > 1
            messages, between, pattern, card = 1, int(leaves), "one", length if leaves else 0
        case _:  # tickets: a store on one node, there and back
            return Crossing("one", 2, 2 if nodes > 1 else 0)
    within = moved.sent if nodes == 1 else moved.inside
    return Crossing(pattern, messages, between, moved.sent, sharing * card, within)


def _mates(ranks: Sequence[int], rank: int, per_node: int) -> Sequence[int]:
    """Those of the ranks that are on this rank's node; of all ranks they follow one another."""
    if isinstance(ranks, range):
        first = rank // per_node * per_node
        return ranks[first : first + per_node]
    return [r for r in ranks if r // per_node == rank // per_node]


def _nodes(ranks: Sequence[int], per_node: int) -> int:
    """The number of nodes that these ranks are on."""
    if isinstance(ranks, range):
        return ceil(len(ranks) / per_node)
    return len(ranks) if per_node == 1 else len({r // per_node for r in ranks})


def _reduce_messages(cluster: Cluster, count: int, nodes: int) -> tuple[int, int, Pattern]:
    """Messages of an all-reduce in a row, and how many of them leave the node: a ring's; for NCCL a tree's where it is faster."""
    ring = 2 * (count - 1), 2 * _ring_between(cluster, count - 1, nodes), "ring"
    if cluster.backend == "gloo" or nodes < 2:
        return ring
    between = 2 * ceil(log2(nodes))
    tree = 2 * (count // nodes - 1) + between, between
    return (*tree, "ring") if tree[1] < ring[1] else ring


def _ring_between(cluster: Cluster, messages: int, nodes: int) -> int:
    """How many of a ring's messages in a row leave the node: each of gloo's steps waits for the slowest of all ranks, and NCCL's
    chunks go on by themselves.
    """
    return 0 if nodes < 2 else nodes - 1 if cluster.backend == "nccl" else messages
