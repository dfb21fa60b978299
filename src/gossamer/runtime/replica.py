"""A replica: the ranks that hold one model together, each a shard of it; most often a single rank."""

from collections.abc import Sequence
from typing import Any, Protocol, final

from gossamer.core.verbs import MembersChanged


class ReplicaRanks(Protocol):
    """What the ranks of one replica ask each other, wherever one of them would else decide by its own shard.

    Law: all of them ask the same questions in the same order.
    """

    index: int  # of this rank's shard
    size: int  # ranks that hold one model together

    def least(self, values: Sequence[float]) -> list[float]:
        """The smallest of each value over the replica's ranks."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over the replica's ranks."""
        ...

    def all(self, holds: bool) -> bool:
        """True if it holds on all ranks of the replica."""
        ...

    def told(self, facts: Any, label: str, step: int, lane: str = "comm") -> list[Any]:
        """The facts of all ranks of the replica, by shard."""
        ...

    def open_lane(self, name: str) -> None:
        """Let `told` be called from another thread, on a comm thread of its own."""
        ...

    def outlive(self, lost: MembersChanged | None) -> None:
        """Raise `lost`, and on all ranks of the replica if one of them has lost what it was at."""
        ...

    def close(self) -> None:
        """Ask no more: ranks of the replica that still wait for this one get an error."""
        ...


@final
class WholeReplica:
    """A rank that holds a whole model: it asks nobody."""

    index, size = 0, 1

    def least(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def total(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all(self, holds: bool) -> bool:
        return holds

    def told(self, facts: Any, label: str, step: int, lane: str = "comm") -> list[Any]:
        return [facts]

    def outlive(self, lost: MembersChanged | None) -> None:
        if lost is not None:
            raise lost

    def open_lane(self, name: str) -> None: ...
    def close(self) -> None: ...
