"""A replica: the ranks that hold one model together, each a shard of it; most often a single rank."""

from collections.abc import Sequence
from typing import Protocol, final


class ReplicaRanks(Protocol):
    """What the ranks of one replica ask each other, wherever one of them would else decide by its own shard.

    Law: all of them ask the same questions in the same order.
    """

    index: int  # of this rank's shard

    def least(self, values: Sequence[float]) -> list[float]:
        """The smallest of each value over the replica's ranks."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the replica's ranks."""
        ...

    def all(self, holds: bool) -> bool:
        """True if it holds on all ranks of the replica."""
        ...


@final
class WholeReplica:
    """A rank that holds a whole model: it asks nobody."""

    index = 0

    def least(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all(self, holds: bool) -> bool:
        return holds
