"""Releases threads that wait for a store, before the interpreter shuts down.

A client of a store waits without end for a frozen host. When the host dies at last, the waiting thread wakes; if the
interpreter is shutting down at that moment, Python ends the thread inside of C++, which aborts the process.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from gossamer.fabrics.reach import address

PATIENCE = 2.0  # seconds that a thread may take to end after its connection is closed

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
            thread.join(PATIENCE)


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
