"""The ranks of a run, numbered among those that are present."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gossamer.core.contracts import Context
from gossamer.core.events import Presence
from gossamer.core.loop import Ranks
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Present
from gossamer.runtime.buckets import settle_owners

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class FormerRanks(NamedTuple):
    """The ranks before a change of members, and their weights. Up to the step `until` batches are still cut for them."""

    until: int
    present: Present
    weights: Sequence[float]


class WorkerRanks(Ranks):
    """The ranks as a worker knows them."""

    def __init__(self, worker: "Worker", rank: int, size: int, seed: int) -> None:
        self._worker, self.rank, self.size, self.seed = worker, rank, size, seed
        self.number, self.present = rank, Present.all_of(rank, size)  # this rank's number in the whole world
        self.weights: Sequence[float] = ()
        self.former = list[FormerRanks]()  # in the order of their changes

    def cut_for(self, step: int) -> tuple[Present, Sequence[float]]:
        """For whom, and by which weights, the batch after `step` steps is cut; on all ranks alike, wherever they learn of a change."""
        for ranks in self.former:
            if step < ranks.until:
                return ranks.present, ranks.weights
        return self.present, self.weights

    def change_after(self, step: int, before: FormerRanks) -> None:
        """Cut batches for those who were there `before` until `step` steps are done, the most that any rank has done."""
        earlier = [ranks._replace(until=min(step, ranks.until)) for ranks in self.former]
        self.former = [ranks for ranks in (*earlier, before._replace(until=step)) if ranks.until >= self._worker.step]

    def regroup(self, present: Present, left: Sequence[int] = ()) -> None:
        """Continue with the ranks present; owners of chunks change."""
        if self.present.ranks != present.ranks:
            for bucket in self._worker.buckets:
                settle_owners(bucket, len(present.ranks))
        self.renumber(present, left)

    def renumber(self, present: Present, left: Sequence[int] = ()) -> None:
        """Count the ranks present, of whom some have `left` in good order; chunks change owners at their next average, once all that is pending is committed."""
        before, self.present = self.present, present
        if before.ranks != present.ranks:
            self.weights = ()
            self.rank, self.size = present.place, len(present.ranks)
            for bucket in self._worker.buckets:
                bucket.shift = bucket.memory.follow(bucket.exchange.omega(bucket.layout, self.size))
        if before != present:  # the last weights were of other ranks; `comm.share` plans new ones
            self.weights = _around_one(present.weights)
        gone, back = before.without(present), present.without(before)
        lost, left = [r for r in gone if r not in left], [r for r in gone if r in left]
        if gone or back:
            self._worker.record.tell(Presence(self._worker.step, self.number, lost, [*back], left))

    def context(self, step: int) -> Context:
        return Context(self.rank, self.size, step, CounterRng(self.seed, step, self.rank))

    def whole_length(self, length: Tensor) -> Tensor:
        replica = self._worker.replica
        if replica.size == 1:
            return length
        mine = float(length)
        return torch.full_like(length, replica.total([mine * mine])[0]).sqrt_()


def _around_one(weights: Sequence[float]) -> Sequence[float]:
    """The weights, 1 on average; empty where all are equal."""
    total = sum(weights)
    return [len(weights) * weight / total for weight in weights] if len({*weights}) > 1 else ()
