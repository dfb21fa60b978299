"""The complete graph."""

from typing import final

from gossamer.core.contracts import Peers, Topology
from gossamer.core.parts import part


@final
@part("complete")
class Complete(Topology):
    """Every rank sends 1/N of its mass to every other rank: an exact average in one round.

    Use: as a baseline for other topologies, with few ranks.

    Not for: saving bytes, because an all-reduce sends less.

    Wire: N - 1 messages of d numbers per round, more than an all-reduce.

    >>> Complete().peers(rank=1, size=4, round=0)
    Peers(to=(0, 2, 3), source=(0, 2, 3), share=0.25)
    """

    @property
    def alike(self) -> bool:
        return True

    def peers(self, rank: int, size: int, round: int) -> Peers:
        others = tuple(r for r in range(size) if r != rank)
        return Peers(others, others, 1 / size if others else 0.0)
