"""What ranks tell one another outside of the collectives: who is where, who claimed what."""

import threading
import time
from collections.abc import Callable

from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]


def poll(ready: Callable[[], bool], seconds: float, halt: threading.Event) -> bool:
    """Ask again and again, ever more slowly, until it is so (True), or time is up or we are told to stop (False)."""
    end, pause = time.monotonic() + seconds, 0.001
    while not ready():
        if time.monotonic() >= end or halt.wait(pause):
            return False
        pause = min(1.5 * pause, 0.005)
    return True


class Board:
    """A key-value store that all ranks of one fabric write to and read from.

    A client of a TCPStore serves one request at a time, so nothing here ever blocks in the store: waiting is asking
    again. Keys are short and values are plain text; a key lives as long as the store, unless somebody deletes it.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.store = store

    @staticmethod
    def alone() -> "Board":
        return Board(HashStore(), 0, 1)

    def under(self, prefix: str) -> "Board":
        """A part of this board; the connection is shared, since a second one can take seconds of name look-ups."""
        return Board(PrefixStore(prefix, self.store), self.rank, self.size)

    def raise_flag(self, name: str, text: str) -> None:
        self.store.set(name, text)

    def flag_is_up(self, name: str) -> bool:
        return self.store.check([name])

    def leave(self) -> None:
        """Tell all others that this rank needs nothing more of them, nor of the store."""
        self.raise_flag(f"left/{self.rank}", "")

    def left(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank and self.flag_is_up(f"left/{r}")]

    def all_left(self) -> bool:
        return self.store.check([f"left/{r}" for r in range(self.size) if r != self.rank])

    def take_down(self, name: str) -> None:
        self.store.delete_key(name)

    def meet(self, key: str, text: str, wait: Callable[[Callable[[], bool]], object]) -> dict[int, str]:
        """Post a text, wait as told for everybody else's, and read those that are there, by rank."""
        self.store.set(f"{key}/{self.rank}", text)
        others = [r for r in range(self.size) if r != self.rank]
        keys = [f"{key}/{r}" for r in others]
        wait(lambda: self.store.check(keys))
        return {r: self.store.get(k).decode() for r, k in zip(others, keys, strict=True) if self.store.check([k])}
