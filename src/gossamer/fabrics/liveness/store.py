"""The store in which ranks meet: one client of it, why it does not answer, and how threads that wait for it are released."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.distributed import HashStore, PrefixStore, Store, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import PeerError
from gossamer.core.torch_private import private_name

T = TypeVar("T")

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

    def take_down(self, *names: str) -> None:
        for name in names:
            self.raw.delete_key(name)

    def swap(self, name: str, before: str, text: str) -> str:
        """Write a text in place of `before`, or of nothing if that is "", in one step; returns what is there then."""
        return self._text(name, self.raw.compare_set(name, before, text))

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

    def numbers(self, names: Sequence[str], below: int = 10**18) -> list[int]:
        """The values of existing keys, which are whole numbers from 0; an error for any other."""
        texts = self.read(names)
        for name, text in zip(names, texts, strict=True):
            if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) < below):
                raise self.malformed(name, text)
        return [int(text) for text in texts]

    def parsed(self, name: str, text: str, read: Callable[[Any], T | None]) -> T:
        """What `read` makes of a key's JSON; an error where it fails or returns None, since no rank writes that."""
        try:
            found = read(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found is None:
            raise self.malformed(name, text)
        return found

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


default_store: Callable[[], Any] = private_name(
    distributed_c10d, "_get_default_store", "lets the ranks of a group meet"
)
"""Returns the store that `init_process_group` received or created."""


_CONNECT = 0.5  # seconds for a connection; the caller is about to raise an error
RANK_0 = "the process that hosts it (usually rank 0)"
AGAIN = "start all ranks again from a checkpoint"


def why_silent(store: Any, host: str = RANK_0) -> str:
    """The cause in words, and what to do; `host` names the store's process. Only a TCP store can be examined."""
    if (found := address(store)) is None:
        return f"{host} has ended, is frozen or cut off, or this rank itself is cut off. Repair that, then {AGAIN}"
    return why_silent_at(*found, host)


def address(store: Any) -> tuple[str, int] | None:
    """Host name and port of a TCP store; None for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    match getattr(store, "host", None), getattr(store, "port", None):
        case str() as name, int() as port:
            return name, port
        case _:
            return None


def why_silent_at(name: str, port: int, host: str = RANK_0) -> str:
    """Like `why_silent`, for a TCP store at this address."""
    try:
        socket.create_connection((name, port), _CONNECT).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return f"the machine at {name}:{port} is up, but {host} has ended. Check the end of its log, then {AGAIN}"
    except OSError:
        return (
            f"{name}:{port} cannot be reached. Either the machine of {host} is down or cut off, or this rank itself is cut "
            f"off: then the errors of the other ranks name this rank as missing. Repair that, then {AGAIN}"
        )
    return f"the machine at {name}:{port} is up, but {host} is frozen. Check why, then {AGAIN}"


_RELEASE = 2.0  # seconds that a thread may take to end after its connection is closed

_asking = WeakKeyDictionary[threading.Thread, Any]()  # threads that wait for a store, and the store


def may_wait(thread: threading.Thread, store: Any) -> None:
    """Register a thread that may wait for a store without end; no other thread may join it without a timeout."""
    _asking[thread] = store


def let_go() -> None:
    """Close the connections that registered threads still wait on; called at the end of the process."""
    held = {thread: address(store) for thread, store in [*_asking.items()] if thread.is_alive()}
    for connection in _connections({port for found in held.values() if found for port in found[1:]}):
        with connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for thread, found in held.items():
        if found:
            thread.join(_RELEASE)


def _connections(ports: set[Any]) -> Iterator[socket.socket]:
    """This process's connections to these ports, as duplicated sockets; torch gives no access to those of its stores."""
    for name in os.listdir("/dev/fd") if ports else ():
        with suppress(OSError):  # no socket, not connected, or the handle of this list
            found = socket.socket(fileno=os.dup(int(name)))
            peer = found.getpeername()
            if isinstance(peer, tuple) and peer[1] in ports:  # a pipe's other end has no port
                yield found
            else:
                found.close()
