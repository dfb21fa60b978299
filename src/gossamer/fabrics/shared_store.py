"""A key-value store for what ranks exchange outside of collectives: statuses, positions, tickets."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError

LONGEST = 2**20  # bytes of a value; no rank writes a longer one


def poll(ready: Callable[[], bool], seconds: float, halt: threading.Event) -> bool:
    """Call `ready` at growing intervals until it returns True; False if time is over or `halt` is set."""
    began, pause = time.monotonic(), 0.001
    while not ready():
        waited = time.monotonic() - began
        if waited >= seconds or halt.wait(min(pause, seconds - waited)):
            return False
        pause = min(1.5 * pause, max(0.005, 0.01 * waited), 0.25)
    return True


class SharedStore:
    """A key-value store that all ranks of one fabric write to and read from.

    A client of a TCPStore serves one request at a time, so no method blocks in the store: waiting is polling. Keys are short
    and values are plain text; a key lives as long as the store, unless a rank deletes it. Any program that reaches the
    store's port can write to it, so values are read as text of limited length only.
    """

    def __init__(self, store: Store, rank: int, size: int, place: str = "") -> None:
        self.rank = rank
        self.size = size
        self.raw = store
        self.place = place  # prefix of its keys, for errors that name them

    @staticmethod
    def alone() -> "SharedStore":
        return SharedStore(HashStore(), 0, 1)

    @property
    def others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def under(self, prefix: str) -> "SharedStore":
        """A part of this store, over the same connection: a second one can take seconds of name look-ups."""
        return SharedStore(PrefixStore(prefix, self.raw), self.rank, self.size, f"{self.place}{prefix}/")

    def among(self, ranks: tuple[int, ...]) -> "SharedStore":
        """A part of this store for a group of ranks, which are numbered in their order."""
        part = self.under(f"group/{','.join(map(str, ranks))}")
        return SharedStore(part.raw, ranks.index(self.rank), len(ranks), part.place)

    def raise_flag(self, name: str, text: str) -> None:
        self.raw.set(name, text)

    def flag_is_up(self, name: str) -> bool:
        return self.raw.check([name])

    def are_there(self, names: Sequence[str]) -> bool:
        return self.raw.check(list(names))

    def take_down(self, name: str) -> None:
        self.raw.delete_key(name)

    def take_all_down(self, names: Sequence[str]) -> None:
        for name in names:
            self.raw.delete_key(name)

    def read(self, names: Sequence[str]) -> list[str]:
        """The values of existing keys, in one request if the store supports it."""
        store: Any = self.raw  # not all that it can is known to type checkers
        if len(names) > 1 and store.has_extended_api():
            values: list[bytes] = store.multi_get(list(names))
        else:
            values = [store.get(name) for name in names]
        return [self._text(name, value) for name, value in zip(names, values, strict=True)]

    def _text(self, name: str, value: bytes) -> str:
        if len(value) > LONGEST:
            raise self.malformed(name, f"{len(value)} bytes")
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self.malformed(name, repr(value)) from None

    def malformed(self, name: str, value: str) -> PeerError:
        """The error for a value that no rank writes."""
        return PeerError(
            f"the store's key {self.place + name!r} holds a value that gossamer does not write: {value[:80]}. Check that no "
            "other program writes to this store, and that all ranks run the same version of gossamer"
        )

    def meet(self, key: str, text: str, wait: Callable[[Callable[[], bool]], object]) -> dict[int, str]:
        """Post a text, wait for those of all other ranks, and return the texts that are there, by rank."""
        self.raw.set(f"{key}/{self.rank}", text)
        keys, arrived = {r: f"{key}/{r}" for r in self.others}, False

        def ready() -> bool:
            nonlocal arrived
            arrived = self.are_there(list(keys.values()))
            return arrived

        wait(ready)
        there = [r for r, k in keys.items() if arrived or self.flag_is_up(k)]
        return dict(zip(there, self.read([keys[r] for r in there]), strict=True))
