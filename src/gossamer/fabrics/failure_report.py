"""The inquiry: what a rank in trouble finds out about the others, for an error that says who is missing."""

import threading
from collections.abc import Callable

from gossamer.core.errors import PeerError
from gossamer.fabrics.fingerprints import CollectiveFingerprint, explain, read_all
from gossamer.fabrics.heartbeat import rank_statuses
from gossamer.fabrics.reach import why_silent
from gossamer.fabrics.shared_store import SharedStore, poll

PATIENCE = 1.0  # seconds that a rank in trouble gives the others to say where they are


class FailureReport:
    """What a rank in trouble asks of the others, while there is time: where are you, have you left, do you live?"""

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
        """What is known by now; `slow` says that the store has answered a while ago."""
        if self._wrong is not None:
            return str(self._wrong)
        if self._done:
            return explain(self._store.rank, self._store.size, self.mine, self._found, self._left, self._alive)
        if slow and not self._refused:
            return (
                "The store that knows where the others are answers too slowly to say it: is its host, as a rule rank 0, or the "
                "network overloaded? Give more time, attach(deadline=...)."
            )
        return f"The store does not answer: {why_silent(self._store.raw)}."
