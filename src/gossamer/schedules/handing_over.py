"""Handing over: ranks that leave give what they owe to the others; in `quorum_rounds` whenever all of them meet.

A meeting may fail at any request, on some ranks and not on others. So who stays prepares to take on its part, and does so when a
sum of all has come, by which all had prepared. If it has come on any rank, the others follow at the next meeting.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.core.bucket import State
from gossamer.core.loop import BucketView, Loop
from gossamer.core.verbs import Program, all_reduce


class Debts:
    """What this rank was given to send and has not sent: in the memories of its buckets, and as the owner of a chunk of each mean.

    Residuals add up: N times the mean, plus all residuals, is the sum of what ranks were given. So a debt is handed over in full,
    in equal parts to all who stay.
    """

    def __init__(self, buckets: Sequence[BucketView]) -> None:
        self._buckets = buckets

    def keys(self) -> list[list[str]]:
        """What this rank owes, by bucket: names of entries."""
        return [[*_debt(bucket)] for bucket in self._buckets]

    def summed(self, mine: bool, keys: Sequence[Sequence[str]]) -> Program[list[State]]:
        """The sum of what those owe who leave; `mine` is True if this rank does. `keys` are the entries that any of them has."""
        totals = list[State]()
        for bucket, wanted in zip(self._buckets, keys, strict=True):
            debt, total = (_debt(bucket) if mine else State()), State()
            for key in wanted:
                given = debt[key].to(bucket.layout.dtype, copy=True) if key in debt else bucket.empty()
                total[key] = yield from all_reduce(given)
            totals.append(total)
        return totals

    def take_on(self, owed: Sequence[State], stay: int) -> None:
        """Take this rank's part of what others owed; `stay` ranks do."""
        for bucket, debt in zip(self._buckets, owed, strict=True):
            bucket.memory.take_on(bucket.states["memory"], debt, 1 / stay)

    def let_go(self) -> None:
        """Owe nothing any more: others have taken it on."""
        for bucket in self._buckets:
            bucket.memory.let_go(bucket.states["memory"])
            for key in bucket.exchange.owned(bucket.states["exchange"]):
                del bucket.states["exchange"][key]


def _debt(bucket: BucketView) -> State:
    memory, exchange = bucket.states["memory"], bucket.states["exchange"]
    owed, kept = bucket.memory.owing(memory), bucket.memory.residual(memory)
    unit = 1.0 if kept is None else kept[1]
    for key in bucket.exchange.owned(exchange):  # of a mean over so many ranks, in the units of the memory
        chunk = exchange[key] * (bucket.owned_by / unit)
        owed["residual"] = owed["residual"] + chunk if "residual" in owed else chunk
    return owed


class HandingOver:
    """One rank's side: whether it leaves, and what it is about to take on from ranks that do."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.leaves = False
        self._number = 0  # of the last handing over that this rank has begun
        self._is_prepared = False
        self._owed = list[State]()  # of those who leave, where this rank has prepared
        self._stay = 0  # ranks that take a part of it; 0 if this one leaves
        self._done = 0  # number of the last one that this rank has ended

    def says(self) -> dict[str, Any]:
        """What others are told when all meet."""
        owes = Debts(self._loop.buckets).keys() if self.leaves else []
        return {"leaves": self.leaves, "owes": owes, "number": self._number, "done": self._done}

    def meet(self, everyone: Sequence[dict[str, Any]]) -> Program[list[int]]:
        """Hand over or take on; returns the places of those who leave. Where all do, nothing is handed over."""
        if self._is_prepared and max(int(told["done"]) for told in everyone) >= self._number:
            self._end()
        self._is_prepared, self._owed = False, []
        leavers = [place for place, told in enumerate(everyone) if told["leaves"]]
        if not leavers or len(leavers) == len(everyone):
            return []
        by_bucket = zip(*(everyone[i]["owes"] for i in leavers), strict=True)
        keys = [sorted({key for its in each for key in its}) for each in by_bucket]
        self._owed = yield from Debts(self._loop.buckets).summed(self.leaves, keys)
        self._number = 1 + max(int(told["number"]) for told in everyone)
        self._stay, self._is_prepared = 0 if self.leaves else len(everyone) - len(leavers), True
        yield from self._all_are_here()
        self._end()
        yield from self._all_are_here()  # who leaves knows now that the others have it
        return leavers

    def _end(self) -> None:
        if self._stay:
            Debts(self._loop.buckets).take_on(self._owed, self._stay)
        else:
            Debts(self._loop.buckets).let_go()
        self._done, self._is_prepared, self._owed = self._number, False, []

    def _all_are_here(self) -> Program[None]:
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=self._loop.buckets[0].device))


def is_valid(said: dict[str, Any], buckets: int) -> bool:
    """True if another rank's `says` is what it should be."""
    owes = said["owes"]
    fits = isinstance(said["leaves"], bool) and isinstance(said["number"], int) and isinstance(said["done"], int)
    fits = fits and isinstance(owes, list) and len(owes) == (buckets if said["leaves"] else 0)
    return fits and all(isinstance(key, str) for keys in owes for key in keys)
