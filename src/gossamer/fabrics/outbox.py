"""Letters on their way: kept alive until the backend has no more need of them."""

import threading
from collections import deque
from queue import SimpleQueue
from typing import Any

from torch import Tensor


class Outbox:
    """Waits for sends where nobody else does.

    A backend may hold a letter back until its reader asks for it, perhaps several programs later; so neither the
    sending program nor its lane can wait. gloo cannot be asked whether a send is done, only be waited for: a thread
    does that. NCCL can be asked, and its waiting would hold up a stream.
    """

    def __init__(self, may_ask: bool) -> None:
        self._may_ask = may_ask
        self.error: RuntimeError | None = None
        self._letters = SimpleQueue[tuple[Any, Tensor]]()
        self._thread: threading.Thread | None = None
        self._queued = deque[tuple[Any, Tensor]]()

    def put(self, work: Any, wire: Tensor) -> None:
        if self._may_ask:
            while self._queued and self._queued[0][0].is_completed():
                self._queued.popleft()
            self._queued.append((work, wire))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="gossamer-outbox", daemon=True)
            self._thread.start()
        self._letters.put((work, wire))

    def close(self, patience: float) -> None:
        """Let the last letters leave, within reason."""
        if self._thread is not None:
            self._letters.put((None, Tensor()))
            self._thread.join(patience)
            self._thread = None

    def _wait(self) -> None:
        while (letter := self._letters.get())[0] is not None:
            try:
                letter[0].wait()
            except RuntimeError as error:
                self.error = self.error or error
            del letter
