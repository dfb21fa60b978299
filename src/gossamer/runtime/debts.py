"""Debts: what a rank was given to send and has not sent, when it leaves in good order, and how those who stay take it on.

Residuals add up: N times the mean, plus all residuals, is the sum of what ranks were given. So a debt is handed over in full, in
equal parts to all who stay; the next means are over fewer ranks, and each of their residuals counts more alike.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from gossamer.core.bucket import State
from gossamer.core.verbs import Program, all_reduce
from gossamer.runtime.buckets import BucketState, owners

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker

Debts = list[State]  # by bucket


def debts_of(worker: "Worker") -> Debts:
    """What this rank owes, by bucket: in its memory, and as the owner of a chunk of each mean."""
    return [_debt(bucket) for bucket in worker.buckets]


def _debt(bucket: BucketState) -> State:
    memory, exchange = bucket.states["memory"], bucket.states["exchange"]
    owed, kept = bucket.memory.owing(memory), bucket.memory.residual(memory)
    unit = 1.0 if kept is None else kept[1]
    for key in owners(bucket, exchange):  # of a mean over so many ranks, in the units of the memory
        chunk = exchange[key] * (bucket.owned_by / unit)
        owed["residual"] = owed["residual"] + chunk if "residual" in owed else chunk
    return owed


def summed(worker: "Worker", mine: Debts | None, keys: Sequence[Sequence[str]]) -> Program[Debts]:
    """The debts of all who leave, summed; `mine` is None on ranks that stay. `keys` are the entries that any of them has."""
    totals = Debts()
    for i, (bucket, wanted) in enumerate(zip(worker.buckets, keys, strict=True)):
        total: State = {}
        for key in wanted:
            held = None if mine is None else mine[i].get(key)
            given = bucket.empty() if held is None else held.to(bucket.layout.dtype, copy=True)
            total[key] = yield from all_reduce(given)
        totals.append(total)
    return totals


def take_on(worker: "Worker", owed: Debts, stay: int) -> None:
    """Take this rank's part of what others owed; `stay` ranks do."""
    for bucket, debt in zip(worker.buckets, owed, strict=True):
        bucket.memory.take_on(bucket.states["memory"], {k: torch.clone(v) for k, v in debt.items()}, 1 / stay)


def let_go(worker: "Worker") -> None:
    """Owe nothing any more: others have taken it on."""
    for bucket in worker.buckets:
        bucket.memory.let_go(bucket.states["memory"])
        for key in owners(bucket, bucket.states["exchange"]):
            del bucket.states["exchange"][key]
