"""Any topology with all edges both ways."""

from typing import final

from gossamer.core.contracts import Peers, Topology
from gossamer.core.parts import part
from gossamer.topologies.ring import Ring


@final
@part("two_way")
class TwoWay(Topology):
    """Makes every edge of a topology two-way; a rank with n neighbours sends each 1/(n+1) of its mass.

    On a ring the shares are (1/3, 1/3, 1/3), and disagreement shrinks by the factor (1 + 2 cos(2 pi / N)) / 3 per round.

    Use: for mixers that need undirected graphs: `symmetric(two_way(ring()))`, `choco(qsgd(), two_way(ring()))`.

    Not for: `push_sum()`, which needs no two-way edges and would send twice as much.

    Wire: one message of d numbers per neighbour and round.

    >>> TwoWay(Ring()).peers(rank=0, size=4, round=0)
    Peers(to=(1, 3), source=(1, 3), share=0.3333333333333333)
    """

    topology: Topology = Ring()

    @property
    def prelude(self) -> int:
        return self.topology.prelude

    @property
    def stages(self) -> tuple[Topology, ...]:
        inner = self.topology.stages
        return (self,) if len(inner) == 1 else tuple(map(TwoWay, inner))

    def period(self, size: int) -> int:
        return self.topology.period(size)

    def peers(self, rank: int, size: int, round: int) -> Peers:
        one = self.topology.peers(rank, size, round)
        both = tuple(sorted({*one.to, *one.source}))
        return Peers(both, both, 1 / (len(both) + 1) if both else 0.0)
