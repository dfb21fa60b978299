"""Finds out why a store does not answer, by one more connection to it."""

import socket
from typing import Any

PATIENCE = 0.5  # seconds for a connection; the caller is about to raise an error
RANK_0 = "the process that hosts it (usually rank 0)"
AGAIN = "start all ranks again from a checkpoint"


def why_silent(store: Any, host: str = RANK_0) -> str:
    """The cause in words, and what to do; `host` names the store's process. Only a TCP store can be examined."""
    if (found := address(store)) is None:
        return f"{host} has ended, is frozen or cut off, or this rank itself is cut off. Repair that, then {AGAIN}"
    return at(*found, host)


def address(store: Any) -> tuple[str, int] | None:
    """Host name and port of a TCP store; None for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    match getattr(store, "host", None), getattr(store, "port", None):
        case str() as name, int() as port:
            return name, port
        case _:
            return None


def at(name: str, port: int, host: str = RANK_0) -> str:
    """Like `why_silent`, for a TCP store at this address."""
    try:
        socket.create_connection((name, port), PATIENCE).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return f"the machine at {name}:{port} is up, but {host} has ended. Check the end of its log, then {AGAIN}"
    except OSError:
        return (
            f"{name}:{port} cannot be reached. Either the machine of {host} is down or cut off, or this rank itself is cut "
            f"off: then the errors of the other ranks name this rank as missing. Repair that, then {AGAIN}"
        )
    return f"the machine at {name}:{port} is up, but {host} is frozen. Check why, then {AGAIN}"
