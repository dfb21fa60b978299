"""Debts: what a rank was given to send and has not sent, when it leaves in good order, and how those who stay take it on.

Residuals add up: N times the mean, plus all residuals, is the sum of what ranks were given. So a debt is handed over in full, in
equal parts to all who stay; the next means are over fewer ranks, and each of their residuals counts more alike.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossamer.core.bucket import State
from gossamer.core.loop import Debts
from gossamer.core.verbs import Program, all_reduce
from gossamer.runtime.buckets import BucketState, owners

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class WorkerDebts(Debts):
    """What a worker owes, by bucket: in its memory, and as the owner of a chunk of each mean."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def keys(self) -> list[list[str]]:
        return [[*_debt(bucket)] for bucket in self._worker.buckets]

    def summed(self, mine: bool, keys: Sequence[Sequence[str]]) -> Program[list[State]]:
        totals = list[State]()
        for bucket, wanted in zip(self._worker.buckets, keys, strict=True):
            debt, total = (_debt(bucket) if mine else State()), State()
            for key in wanted:
                given = debt[key].to(bucket.layout.dtype, copy=True) if key in debt else bucket.empty()
                total[key] = yield from all_reduce(given)
            totals.append(total)
        return totals

    def take_on(self, owed: Sequence[State], stay: int) -> None:
        for bucket, debt in zip(self._worker.buckets, owed, strict=True):
            bucket.memory.take_on(bucket.states["memory"], debt, 1 / stay)

    def let_go(self) -> None:
        for bucket in self._worker.buckets:
            bucket.memory.let_go(bucket.states["memory"])
            for key in owners(bucket, bucket.states["exchange"]):
                del bucket.states["exchange"][key]


def _debt(bucket: BucketState) -> State:
    memory, exchange = bucket.states["memory"], bucket.states["exchange"]
    owed, kept = bucket.memory.owing(memory), bucket.memory.residual(memory)
    unit = 1.0 if kept is None else kept[1]
    for key in owners(bucket, exchange):  # of a mean over so many ranks, in the units of the memory
        chunk = exchange[key] * (bucket.owned_by / unit)
        owed["residual"] = owed["residual"] + chunk if "residual" in owed else chunk
    return owed
