"""A switch from one topology to another at some round."""

from typing import final

from gossamer.core.contracts import Peers, Topology
from gossamer.core.parts import part, require


@final
@part("switch", sample="switch(exponential(count=2), 1000, exponential())")
class Switch(Topology):
    """Uses the topology `before` for the first `rounds` rounds, then `after`.

    Use: to mix more while models differ most, such as two peers in the first epochs and one later.

    Wire: the messages of the current topology.

    >>> from gossamer.topologies import Exponential
    >>> [Switch(Exponential(2), 1, Exponential()).peers(0, 9, k).to for k in range(3)]
    [(1, 2), (1,), (2,)]

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """

    before: Topology
    rounds: int
    after: Topology

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"switch: rounds must be 1 or more, got {self.rounds}; or use {self.after} alone")

    @property
    def alike(self) -> bool:
        return self.before.alike and self.after.alike

    @property
    def prelude(self) -> int:
        return self.rounds + self.after.prelude

    @property
    def stages(self) -> tuple[Topology, ...]:
        return (*self.before.stages, *self.after.stages)

    def period(self, size: int) -> int:
        return self.after.period(size)

    def peers(self, rank: int, size: int, round: int) -> Peers:
        if round < self.rounds:
            return self.before.peers(rank, size, round)
        return self.after.peers(rank, size, round - self.rounds)
