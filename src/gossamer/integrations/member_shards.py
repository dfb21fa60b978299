"""Shards of a member: the ranks of a node, each of which meets those of other nodes that hold the same shard.

So shards are averaged in worlds of their own, and a node may be lost in one of them before it is in another. Whatever the ranks of
a node ask each other, they also tell whether they have lost what they were at, and in which generation they are. So all of them
drop a step, or none does, and all meet the other nodes in one generation, at the same place of a step.
"""

from collections.abc import Sequence
from typing import Any, final

from gossamer.core.verbs import MembersChanged
from gossamer.integrations.regrouping import MemberFabric
from gossamer.runtime import ReplicaRanks

QUESTION = "asking the other shards of this member"


@final
class MemberShards:
    """A `ReplicaRanks` for a node that is a member, over the group of its ranks."""

    def __init__(self, shards: ReplicaRanks, fabric: MemberFabric) -> None:
        self.index, self.size = shards.index, shards.size
        self._shards, self._fabric, self._asked = shards, fabric, 0
        self._heard: MembersChanged | None = None  # the last loss of which all ranks of the node know

    def least(self, values: Sequence[float]) -> list[float]:
        return [min(column) for column in zip(*self._ask([float(v) for v in values]), strict=True)]

    def total(self, values: Sequence[float]) -> list[float]:
        return [sum(column) for column in zip(*self._ask([float(v) for v in values]), strict=True)]

    def all(self, holds: bool) -> bool:
        return all(bool(said[0]) for said in self._ask([float(holds)]))

    def outlive(self, lost: MembersChanged | None) -> None:
        if lost is not None and lost is self._heard:
            raise lost
        self._ask([], lost)

    def told(self, facts: Any, label: str, step: int, lane: str = "comm") -> list[Any]:
        return self._shards.told(facts, label, step, lane)

    def open_lane(self, name: str) -> None:
        self._shards.open_lane(name)

    def close(self) -> None:
        self._shards.close()

    def _ask(self, values: list[float], lost: MembersChanged | None = None) -> list[list[float]]:
        """What each rank of the node says. Raises MembersChanged on all of them where one has lost what it was at."""
        everyone = self._tell(values, lost)
        generations = [one["generation"] for one in everyone]
        while min(generations) < max(generations):
            if (reunion := self._fabric.reunion) is not None and reunion.generation < max(generations):
                reunion.catch_up()
            generations = [one["generation"] for one in self._tell([], None)]
        if any(one["lost"] for one in everyone):
            self._heard = lost or MembersChanged("another rank of this node has lost what all of its ranks were at")
            raise self._heard
        return [one["values"] for one in everyone]

    def _tell(self, values: list[float], lost: MembersChanged | None) -> list[dict[str, Any]]:
        self._asked += 1
        reunion = self._fabric.reunion
        generation = reunion.generation if reunion is not None and reunion.is_open else 0
        mine = {"values": values, "lost": lost is not None, "generation": generation}
        return self._shards.told(mine, QUESTION, self._asked)
