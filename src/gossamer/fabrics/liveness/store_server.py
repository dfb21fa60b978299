"""Hosts the store in a process of its own, so that it outlives every rank; `gossamer.members` starts it if none runs.

The process ends by itself: `REST` seconds after all ranks have left, or `PATIENCE` seconds after the last heartbeat, or
call of `members`. Who has called that since the others have left may load its model and data first.
"""

import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import AttachError, PeerError
from gossamer.fabrics.liveness.launch import MemberLaunch
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.seats import Beat, Seats, Terms
from gossamer.fabrics.liveness.store import SharedStore, poll

REST, PATIENCE = 30.0, 600.0
CONNECT = 300.0  # seconds that a member waits for a store
ARRIVALS = "arrivals"  # a counter of the calls of `members`
_started = list[subprocess.Popen[bytes]]()  # kept, so that Python does not warn about them


def members(
    silence: float = 10.0, *, least: int | None = None, most: int | None = None, store: str | None = None
) -> Members:
    """Join a set of processes of which some may die and come back, and more may come; give it to `attach` as process group.

    Training starts when `least` members are there; others may come at any time, until `most` train. Both default to
    WORLD_SIZE: then all have to come once. The store gives each member a seat, which is its `comm.rank`: the lowest that is free,
    or whose member is dead. Where RANK is set, the seat is that one.

    The members find one another through a store at `store`, 'host:port', or at MASTER_ADDR and MASTER_PORT; any
    `torch.distributed.TCPStore` will do. If none answers there, a member on that machine, or rank 0, starts one in a process of
    its own, which outlives it. If that process or its machine dies, all members end with an error: choose a machine that stays.

    Under a torchrun of its own (`--nnodes 1`), with `store`, the ranks of a node are one member: they come and leave together, and
    `least` and `most` count nodes. A torchrun of all is refused: it ends all when one dies.

    A member that dies is left out at once; one that is cut off or frozen, after `silence` seconds.
    """
    if not silence > 0:
        raise AttachError(
            f"members(silence={silence!r}): give the seconds without a sign of life after which a member is lost"
        )
    launch = MemberLaunch.read(least, most, store)
    if launch.starts_store and not _answers(launch.host, launch.port):
        command = [sys.executable, "-m", "gossamer.fabrics.liveness.store_server", str(launch.port)]
        quiet = subprocess.DEVNULL
        _started.append(subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet))
    ranks = launch.node.size
    return Members(_connect(launch), launch.seat, launch.most * ranks, silence, launch.least * ranks, launch.node)


def _connect(launch: MemberLaunch) -> TCPStore:
    host, port = launch.host, launch.port
    if not poll(lambda: _answers(host, port), CONNECT, threading.Event()):
        raise PeerError(
            f"no store answers at {host}:{port} after {CONNECT:g} seconds: it is started by a member on that machine, or by rank 0. Check "
            "that address, that this machine reaches it, and the log of that member"
        )
    try:
        store = TCPStore(host, port, None, False, timedelta(seconds=300), wait_for_workers=False)
        _part_of(store).raw.add(ARRIVALS, 1)
    except RuntimeError as error:
        raise PeerError(f"what answers at {host}:{port} is not a torch.distributed.TCPStore: {error}") from None
    return store


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return True
    except OSError:
        return False


def hold(port: int) -> None:
    """Host a store until no rank needs it."""
    raw = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=300), wait_for_workers=False)
    store, beats, arrivals = _part_of(raw), dict[int, Beat](), 0
    came = stirred = time.monotonic()
    while True:
        time.sleep(1.0)
        before, beats, now = beats, _beats(store), time.monotonic()
        if beats != before:
            stirred = now
        if (counted := store.raw.add(ARRIVALS, 0)) != arrivals:
            arrivals, came = counted, now
        over = stirred > came and bool(beats) and all(beat.has_left for beat in beats.values())
        if now - max(came, stirred) > (REST if over else PATIENCE):
            return


def _part_of(store: TCPStore) -> SharedStore:
    """The part that the members of a run use."""
    return SharedStore(store, 0, 1).under("gossamer/members")


def _beats(store: SharedStore) -> dict[int, Beat]:
    if not store.flag_is_up("terms"):
        return {}
    (text,) = store.read(["terms"])
    return Seats(store, store.parsed("terms", text, Terms.of)).beats()


if __name__ == "__main__":
    hold(int(sys.argv[1]))
