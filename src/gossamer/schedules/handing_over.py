"""Handing over in `quorum_rounds`: ranks that leave give what they owe to the others, whenever all of them meet.

A meeting may fail at any request, on some ranks and not on others. So who stays prepares to take on its part, and does so when a
sum of all has come, by which all had prepared. If it has come on any rank, the others follow at the next meeting.
"""

from collections.abc import Sequence
from typing import Any

import torch

from gossamer.core.bucket import State
from gossamer.core.loop import Loop
from gossamer.core.verbs import Program, all_reduce


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
        owes = self._loop.averages.debts.keys() if self.leaves else []
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
        self._owed = yield from self._loop.averages.debts.summed(self.leaves, keys)
        self._number = 1 + max(int(told["number"]) for told in everyone)
        self._stay, self._is_prepared = 0 if self.leaves else len(everyone) - len(leavers), True
        yield from self._all_are_here()
        self._end()
        yield from self._all_are_here()  # who leaves knows now that the others have it
        return leavers

    def _end(self) -> None:
        if self._stay:
            self._loop.averages.debts.take_on(self._owed, self._stay)
        else:
            self._loop.averages.debts.let_go()
        self._done, self._is_prepared, self._owed = self._number, False, []

    def _all_are_here(self) -> Program[None]:
        yield from all_reduce(torch.ones(1, dtype=torch.float32, device=self._loop.buckets[0].device))


def is_valid(said: dict[str, Any], buckets: int) -> bool:
    """True if another rank's `says` is what it should be."""
    owes = said["owes"]
    fits = isinstance(said["leaves"], bool) and isinstance(said["number"], int) and isinstance(said["done"], int)
    fits = fits and isinstance(owes, list) and len(owes) == (buckets if said["leaves"] else 0)
    return fits and all(isinstance(key, str) for keys in owes for key in keys)
