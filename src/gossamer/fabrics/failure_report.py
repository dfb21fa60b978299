"""Collects what the other ranks do after a failure, for an error that names the missing ranks."""

import threading
from collections.abc import Callable

from gossamer.core.errors import PeerError
from gossamer.fabrics.fingerprints import CollectiveFingerprint, explain, read_all
from gossamer.fabrics.heartbeat import rank_statuses
from gossamer.fabrics.reach import why_silent
from gossamer.fabrics.shared_store import SharedStore, poll

PATIENCE = 1.0  # seconds that a failed rank gives the others to report their position


class FailureReport:
    """Asks the other ranks, after a failure, for their position, and whether they have left or are alive."""

    def __init__(self, store: SharedStore, mine: CollectiveFingerprint, patience: float = PATIENCE) -> None:
        self._store, self.mine, self._patience = store, mine, patience
        self._found = dict[int, CollectiveFingerprint]()
        self._left, self._alive = list[int](), list[int]()
        self._done = self._refused = False
        self._wrong: PeerError | None = None

    def ask(self) -> None:
        try:
            self._store.raise_flag("broken", self.mine.trouble)
            before = rank_statuses(self._store)
            self._found = self._positions()
            after = rank_statuses(self._store)
            self._left = [r for r, word in after.items() if word.state == "left"]
            self._alive = [r for r, word in after.items() if r in before and before[r] != word]
            self._done = True
        except PeerError as wrong:
            self._wrong = wrong
        except RuntimeError:
            self._refused = True

    def _positions(self) -> dict[int, CollectiveFingerprint]:
        def wait(ready: Callable[[], bool]) -> None:
            poll(ready, self._patience, threading.Event())

        posts = self._store.meet("end", self.mine.write(), wait)
        return read_all(self._store, "end", posts)

    def answer(self, slow: bool) -> str:
        """The findings so far, in words; `slow` means that the store has answered not long ago."""
        if self._wrong is not None:
            return str(self._wrong)
        if self._done:
            return explain(self._store.rank, self._store.size, self.mine, self._found, self._left, self._alive)
        if slow and not self._refused:
            return (
                "The store answers too slowly to report the positions of the other ranks. Check whether its host (usually rank 0) "
                "or the network is overloaded, or give more time: attach(deadline=...)."
            )
        return f"The store does not answer: {why_silent(self._store.raw)}."
