"""Why a store does not answer, as far as one more connection to it can tell."""

import socket
from typing import Any

PATIENCE = 0.5  # seconds for a connection; whoever asks has an error to raise
RANK_0 = "the process that hosts it, as a rule rank 0,"
AGAIN = "start all ranks again, from a checkpoint"


def why_silent(store: Any, host: str = RANK_0) -> str:
    """In words, and what to do; `host` is whose process it is in. Only stores of TCP can be looked at."""
    if (found := address(store)) is None:
        return f"{host} is gone, frozen or cut off, or this rank's own link is; mend it, then {AGAIN}"
    return at(*found, host)


def address(store: Any) -> tuple[str, int] | None:
    """Where a store of TCP is."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    match getattr(store, "host", None), getattr(store, "port", None):
        case str() as name, int() as port:
            return name, port
        case _:
            return None


def at(name: str, port: int, host: str = RANK_0) -> str:
    """As `why_silent`, of the store that should be there."""
    try:
        socket.create_connection((name, port), PATIENCE).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return f"the machine at {name}:{port} does, and {host} is gone; see what its log says last, then {AGAIN}"
    except OSError:
        return (
            f"{name}:{port} cannot be reached. Either {host} is on a machine that is gone or cut off, or this rank's own link is "
            f"cut: the other ranks' errors tell, they miss this rank then. Mend it, then {AGAIN}"
        )
    return f"the machine at {name}:{port} does, and {host} is frozen or stands still; see why, then {AGAIN}"
