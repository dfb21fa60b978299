"""Letters on their way: kept alive until the backend has no more need of them."""

import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from torch import Tensor

FOR_EVER = timedelta(days=1000)  # a backend's own patience: the pulse tells when to wait no longer


class PendingSends:
    """Waits for sends where nobody else does.

    A backend may hold a letter back until its reader asks for it, perhaps several programs later; so neither the
    sending program nor its lane can wait. gloo cannot be asked whether a send is done, only be waited for: a thread
    does that.
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
        """Let the last letters leave, within reason; False if some have not."""
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
