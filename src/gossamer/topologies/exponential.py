"""The directed exponential graph."""

from functools import lru_cache
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
        return len(_hops(self.count, size))

    def peers(self, rank: int, size: int, round: int) -> Peers:
        rounds = _hops(self.count, size)
        hops = rounds[round % len(rounds)]
        to, source = [(rank + h) % size for h in hops], [(rank - h) % size for h in hops]
        return Peers(tuple(to), tuple(source), 1 / (len(hops) + 1) if hops else 0.0)


@lru_cache(maxsize=64)  # a check of a topology asks for the peers of each rank in each round
def _hops(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the distinct hops of each round other than 0: for some N and p the formula repeats a rank, or names the rank itself.

    Rounds are counted with integers: a logarithm may round wrongly at exact powers.
    """
    base, steps = count + 1, [1]
    while base * steps[-1] < size:
        steps.append(base * steps[-1])
    return tuple(tuple(sorted({j * step % size for j in range(1, base)} - {0})) for step in steps)
