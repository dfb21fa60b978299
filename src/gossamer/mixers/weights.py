"""Symmetric mixing weights for undirected graphs."""

from gossamer.core.contracts import Topology
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part
from gossamer.core.topology import is_undirected, rounds


def metropolis(topology: Topology, rank: int, size: int, round: int) -> list[float]:
    """Return the Metropolis weight W_ij = 1 / (1 + max(deg_i, deg_j)) of each peer; doubly stochastic if undirected.

    >>> from gossamer.topologies import Graph, Ring, TwoWay
    >>> metropolis(TwoWay(Ring()), 0, 6, 0) == [1 / 3, 1 / 3]
    True
    >>> metropolis(Graph("0-1 0-2 0-3"), 1, 4, 0)
    [0.25]
    """
    to = topology.peers(rank, size, round).to
    return [1 / (1 + max(len(to), len(topology.peers(j, size, round).to))) for j in to]


def given(topology: Topology, rank: int, size: int, round: int) -> list[float]:
    """Return the topology's own shares."""
    return [*topology.peers(rank, size, round).shares]


def refuse_directed(part: Part, topology: Topology, size: int, instead: str = "push_sum({})") -> None:
    if not is_undirected(topology, size):
        raise AttachError(
            f"{part} needs an undirected graph, and {topology} has edges in one direction only, so models would not "
            f"converge to their average; use two_way({topology}), or {instead.format(topology)}"
        )


def refuse_unequal(part: Part, topology: Topology, size: int) -> None:
    """Raise unless the topology's shares are equal in both directions of each edge."""
    for stage in topology.stages:
        for round in rounds(stage, size):
            shares = [dict(zip((p := stage.peers(rank, size, round)).to, p.shares)) for rank in range(size)]
            for i, row in enumerate(shares):
                for j, share in row.items():
                    if abs(share - shares[j][i]) > 1e-9:
                        raise AttachError(
                            f"{part}: rank {i} gives rank {j} {share:.4g} and gets {shares[j][i]:.4g} in round {round} of {stage}, "
                            "so the weights are not doubly stochastic, and models would not converge to their average; use "
                            f"weights='metropolis', or push_sum({topology})"
                        )
