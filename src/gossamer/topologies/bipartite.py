"""The bipartite exponential graph: pairs of an even and an odd rank."""

from typing import final

from gossamer.core.binding import Binding
from gossamer.core.contracts import Peers, Topology
from gossamer.core.errors import AttachError
from gossamer.core.parts import part


@final
@part("bipartite")
class Bipartite(Topology):
    """In round k every even rank pairs with the odd rank 2^((k mod L) + 1) - 1 ahead; each sends half of its mass.

    L is the number of these hops 1, 3, 7, ... that are below N. Each round is a perfect matching: symmetric, one message per rank,
    both ways over one link. For N = 2, 4, 8, 16, ... L rounds are an exact average.

    Use: in `symmetric()`, to send one message per round; on links that send both ways at once.

    Not for: an odd number of ranks, where one rank would have no partner.

    Wire: one message of d numbers per round.

    >>> [Bipartite().peers(0, 8, k).to for k in range(4)]
    [(1,), (3,), (7,), (1,)]

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    @property
    def alike(self) -> bool:
        return True

    def period(self, size: int) -> int:
        return max(size.bit_length() - 1, 1)  # the number of hops 2^(k + 1) - 1 below an even N

    def peers(self, rank: int, size: int, round: int) -> Peers:
        if size == 1:
            return Peers((), (), 0.0)
        hop = 2 ** (round % self.period(size) + 1) - 1
        partner = ((rank - hop if rank % 2 else rank + hop) % size,)
        return Peers(partner, partner, 0.5)

    def fits(self, binding: Binding) -> None:
        if binding.size % 2 and binding.size > 1:
            raise AttachError(
                f"{self} pairs even ranks with odd ranks, and of {binding.size} ranks one would have no partner; use an even number "
                "of ranks, two_way(ring()), or in pairwise() a bipartite graph such as graph('0-1 0-2')"
            )
        super().fits(binding)
