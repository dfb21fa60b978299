"""Pairs of an even and an odd rank."""

from typing import final

from gossamer.core.binding import Binding
from gossamer.core.contracts import Peers, Topology
from gossamer.core.errors import AttachError
from gossamer.core.parts import part


@final
@part("bipartite")
class Bipartite(Topology):
    """In round k every even rank pairs with the odd rank 2^((k mod L) + 1) - 1 ahead; each of the two gives the other half.

    L is how many of these odd hops 1, 3, 7, ... are below N. Each round is a perfect matching: symmetric, one message a rank,
    both ways over one link. For N = 2, 4, 8, 16, ... L rounds are an exact average.

    Use: in `symmetric()`, where one message a round shall do; among hosts whose links carry both ways at once.

    Not for: an odd number of ranks: somebody would have no partner.

    Wire: one message of d numbers a round.

    >>> [Bipartite().peers(0, 8, k).to for k in range(4)]
    [(1,), (3,), (7,), (1,)]

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    @property
    def alike(self) -> bool:
        return True

    def period(self, size: int) -> int:
        return max(size.bit_length() - 1, 1)  # of the hops 2^(k + 1) - 1 those below an even N

    def peers(self, rank: int, size: int, round: int) -> Peers:
        if size == 1:
            return Peers((), (), 0.0)
        hop = 2 ** (round % self.period(size) + 1) - 1
        partner = ((rank - hop if rank % 2 else rank + hop) % size,)
        return Peers(partner, partner, 0.5)

    def fits(self, binding: Binding) -> None:
        if binding.size % 2 and binding.size > 1:
            raise AttachError(
                f"{self} pairs even ranks with odd ones, and of {binding.size} ranks one would have no partner; use an even number "
                "of ranks, two_way(ring()), or in pairwise() a graph of two sides, such as graph('0-1 0-2')"
            )
        super().fits(binding)
