"""Sends in flight: keeps their tensors alive until the backend has sent them."""

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch import Tensor

FOR_EVER = timedelta(days=1000)  # timeout of the backend itself: the heartbeat decides when to stop waiting


class PendingSends:
    """Waits for sends in a thread of its own.

    A backend may hold a message back until its receiver asks for it, perhaps several programs later; so neither the
    sending program nor its comm thread can wait. gloo cannot be asked whether a send is done, only waited for.
    """

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self._letters = SimpleQueue[tuple[Any, Tensor]]()
        self._thread: threading.Thread | None = None
        self._closing = False

    def put(self, work: Any, wire: Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="gossamer-outbox", daemon=True)
            self._thread.start()
        self._letters.put((work, wire))

    def close(self, patience: float) -> bool:
        """Wait for the last sends, at most `patience` seconds; False if some are still in flight."""
        if self._thread is None:
            return True
        if not self._closing:
            self._closing = True
            self._letters.put((None, Tensor()))
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _wait(self) -> None:
        while (letter := self._letters.get())[0] is not None:
            try:
                letter[0].wait(FOR_EVER)
            except RuntimeError as error:
                self.error = self.error or error
            del letter
