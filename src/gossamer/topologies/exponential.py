"""The directed exponential graph."""

from typing import final

from gossamer.core.contracts import Peers, Topology
from gossamer.core.parts import part, require


@final
@part("exponential")
class Exponential(Topology):
    """In round k every rank sends to the ranks j (p+1)^(k mod L) ahead, j = 1..p, and keeps 1/(p+1) of its mass.

    With one peer the hops are 1, 2, 4, ..., L = ceil(log2 N) of them; if N is a power of two, L rounds are an exact average.

    Use: by default: with one peer, every rank's model reaches every other rank within ceil(log2 N) rounds.

    Wire: p messages of d numbers per round, one hop of latency.

    >>> [Exponential().peers(0, 8, k).to for k in range(4)]
    [(1,), (2,), (4,), (1,)]

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    count: int = 1

    def __post_init__(self) -> None:
        require(self.count >= 1, f"exponential: count must be at least 1 peer, got {self.count}")

    @property
    def alike(self) -> bool:
        return True

    def period(self, size: int) -> int:
        """Return the number of hops, counted with integers: a logarithm may round wrongly at exact powers."""
        hops = 1
        while (self.count + 1) ** hops < size:
            hops += 1
        return hops

    def peers(self, rank: int, size: int, round: int) -> Peers:
        hops = self._hops(size, round)
        to = tuple((rank + h) % size for h in hops)
        source = tuple((rank - h) % size for h in hops)
        return Peers(to, source, 1 / (len(hops) + 1) if hops else 0.0)

    def _hops(self, size: int, round: int) -> list[int]:
        """Return the distinct hops other than 0: for some N and p the formula repeats a rank, or names the rank itself."""
        base = self.count + 1
        step = base ** (round % self.period(size))
        return sorted({j * step % size for j in range(1, base)} - {0})
