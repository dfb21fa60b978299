"""Topologies: each rank's neighbours in each round, and checks that models can reach consensus."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

from gossamer.core.binding import Binding
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part


class Peers(NamedTuple):
    """One rank's neighbours in one round: it sends `share` of its mass to each of `to`, and receives from `source`.

    Where the shares differ, there is one for each of `to`, in that order.
    """

    to: tuple[int, ...]
    source: tuple[int, ...]
    share: float | tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The share sent to each of `to`."""
        return self.share if isinstance(self.share, tuple) else (self.share,) * len(self.to)

    @property
    def keep(self) -> float:
        """The share of its mass that the rank keeps."""
        return 1 - (sum(self.share) if isinstance(self.share, tuple) else self.share * len(self.to))


class Topology(Part):
    """Each rank's neighbours in each round: pure arithmetic, no process groups.

    Law: `j in peers(i).to` iff `i in peers(j).source`; no rank is its own neighbour; every rank keeps some of its mass. After
    `prelude` rounds it repeats itself every `period` rounds, over which news from any rank gets to every other. If it is
    `alike`, all ranks have as many peers in a round, hear from as many, and share as much.
    """

    kind: ClassVar[str] = "topology"

    @property
    def alike(self) -> bool:
        """True if all ranks have equal numbers of peers and equal shares in a round."""
        return False

    @property
    def prelude(self) -> int:
        """The number of first rounds, before the rounds repeat."""
        return 0

    @property
    def stages(self) -> tuple["Topology", ...]:
        """The topologies it consists of, one after the other; itself, unless it changes for good. A check of every
        round checks each of them.
        """
        return (self,)

    def period(self, size: int) -> int:
        """The number of rounds after which it repeats; 1 unless it changes from round to round."""
        return 1

    @abstractmethod
    def peers(self, rank: int, size: int, round: int) -> Peers: ...

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        if binding.size > 1:
            refuse_unsound(self, binding.size)


def refuse_unsound(topology: Topology, size: int) -> None:
    """Raise AttachError for a graph that loses mass, has unmatched messages, or is not connected."""
    heard: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for round in rounds(topology, size):
        found = [topology.peers(rank, size, round) for rank in range(size)]
        _refuse_shares(topology, round, found)
        _refuse_strangers(topology, round, found)
        for rank, peers in enumerate(found):
            heard[rank].update(peers.source)
    _refuse_islands(topology, size, heard)


def rounds(topology: Topology, size: int) -> range:
    """One period of rounds, after the prelude."""
    return range(topology.prelude, topology.prelude + topology.period(size))


def is_undirected(topology: Topology, size: int) -> bool:
    """True if in every round each rank receives from the ranks that it sends to."""
    found = (
        stage.peers(rank, size, round)
        for stage in topology.stages
        for round in rounds(stage, size)
        for rank in range(size)
    )
    return all(set(peers.to) == set(peers.source) for peers in found)


@lru_cache(maxsize=64)  # each rank asks for them at every meeting
def sides(topology: Topology, size: int) -> tuple[frozenset[int], frozenset[int]]:
    """The two sides of a bipartite graph, rank 0's first; raises AttachError if it is not bipartite."""
    near = [
        {other for s in topology.stages for round in rounds(s, size) for other in s.peers(rank, size, round).to}
        for rank in range(size)
    ]
    side, edge = {0: 0}, [0]
    while edge:
        rank = edge.pop()
        for other in sorted(near[rank]):
            if other not in side:
                side[other] = 1 - side[rank]
                edge.append(other)
            elif side[other] == side[rank]:
                raise AttachError(
                    f"{topology} is not bipartite: ranks {rank} and {other} of {size} are neighbours on the same side, so "
                    "that ranks waiting for answers could deadlock in a circle; use bipartite(), or a graph without "
                    "a circle of odd length, such as two_way(ring()) of an even number of ranks"
                )
    first = frozenset(rank for rank, of in side.items() if of == 0)
    return first, frozenset(range(size)) - first


def _refuse_shares(topology: Topology, round: int, found: Sequence[Peers]) -> None:
    sound = set[tuple[float | tuple[float, ...], int]]()  # most ranks share as others do
    for rank, peers in enumerate(found):
        if (like := (peers.share, len(peers.to))) in sound:
            continue
        if len(peers.shares) != len(peers.to) or min((peers.keep, *peers.shares)) <= 0:
            raise AttachError(
                f"{topology} is not column-stochastic: in round {round}, rank {rank} gives {_listed(peers.to)} "
                f"{peers.share} and keeps {peers.keep:.3g}; these shares must be positive and add up to 1"
            )
        sound.add(like)


def _refuse_strangers(topology: Topology, round: int, found: Sequence[Peers]) -> None:
    senders: list[list[int]] = [[] for _ in found]
    for rank, peers in enumerate(found):
        for to in peers.to:
            senders[to % len(found)].append(rank)
    for rank, peers in enumerate(found):
        if sorted(peers.source) != senders[rank] or rank in senders[rank]:
            raise AttachError(
                f"{topology}: in round {round}, rank {rank} receives from {_listed(peers.source)}, but messages to it come "
                f"from {_listed(senders[rank])}; `source` must be the ranks that have it in `to`, without itself"
            )


def _refuse_islands(topology: Topology, size: int, heard: Mapping[int, set[int]]) -> None:
    """Raise AttachError unless rank 0 reaches all ranks and is reached by all, so that the graph is connected."""
    told: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for rank, sources in heard.items():
        for source in sources:
            told[source].add(rank)
    for words, edges in ("never receives news of", heard), ("never sends news to", told):
        if missing := sorted(set(range(size)) - _reached(edges)):
            raise AttachError(
                f"{topology} is not connected: among {size} ranks, over its period of {topology.period(size)} rounds, rank 0 "
                f"{words} {_listed(missing)}, so that models would never agree; add the edges that are missing"
            )


def _reached(edges: Mapping[int, set[int]]) -> set[int]:
    """The ranks that can be reached from rank 0."""
    reached, edge = {0}, [0]
    while edge:
        new = edges[edge.pop()] - reached
        reached |= new
        edge += new
    return reached


def _listed(ranks: Iterable[int], most: int = 8) -> str:
    named = sorted(ranks)
    some = ", ".join(map(str, named[:most])) + (", ..." if len(named) > most else "")
    return f"rank{'s' * (len(named) > 1)} {some}" if named else "nobody"
