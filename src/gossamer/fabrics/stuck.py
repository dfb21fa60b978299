"""Threads that a store holds up: they are let go before the interpreter is taken down.

A client of a store waits without end for a host that stands still. When the host dies at last, the waiting thread wakes; if
the interpreter is being taken down at that moment, Python ends the thread inside of C++, which aborts the process.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from gossamer.fabrics.reach import address

PATIENCE = 2.0  # seconds in which a thread ends whose connection has been closed

_asking = WeakKeyDictionary[threading.Thread, Any]()  # threads that ask a store, and which


def may_wait(thread: threading.Thread, store: Any) -> None:
    """This thread asks this store, and nobody may wait for it."""
    _asking[thread] = store


def let_go() -> None:
    """At the end of this process: no answer is needed any more, so close the connections that threads still wait on."""
    held = {thread: address(store) for thread, store in [*_asking.items()] if thread.is_alive()}
    for connection in _connections({port for found in held.values() if found for port in found[1:]}):
        with connection, suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    for thread, found in held.items():
        if found:
            thread.join(PATIENCE)


def _connections(ports: set[Any]) -> Iterator[socket.socket]:
    """Ours to these ports, each as another handle of it. Torch gives no access to those of its stores."""
    for name in os.listdir("/dev/fd") if ports else ():
        with suppress(OSError):  # no socket, not connected, or the handle of this list
            found = socket.socket(fileno=os.dup(int(name)))
            peer = found.getpeername()
            if isinstance(peer, tuple) and peer[1] in ports:  # a pipe's other end has no port
                yield found
            else:
                found.close()
