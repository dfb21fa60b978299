"""The one-way ring."""

from typing import final

from gossamer.core.contracts import Peers, Topology
from gossamer.core.parts import part


@final
@part("ring")
class Ring(Topology):
    """Every rank sends half of its mass to the next rank.

    Use: when each rank can reach only the next one.

    Not for: many ranks, because models mix slowly.

    Wire: one message of d numbers per round. Disagreement shrinks by the factor cos(pi / N) per round.

    >>> Ring().peers(rank=3, size=4, round=0)
    Peers(to=(0,), source=(2,), share=0.5)
    """

    @property
    def alike(self) -> bool:
        return True

    def peers(self, rank: int, size: int, round: int) -> Peers:
        if size == 1:
            return Peers((), (), 0.0)
        return Peers(((rank + 1) % size,), ((rank - 1) % size,), 0.5)
