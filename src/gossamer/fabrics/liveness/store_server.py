"""Hosts the store in a process of its own, so that it outlives every rank; `gossamer.members` starts it if none runs.

The process ends by itself: `REST` seconds after all ranks have left, or `PATIENCE` seconds after the last heartbeat.
"""

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gossamer.core.errors import AttachError
from gossamer.fabrics.liveness.members import LEFT, Members

REST, PATIENCE = 30.0, 600.0
_started = list[subprocess.Popen[bytes]]()  # kept, so that Python does not warn about them


def members(silence: float = 10.0) -> Members:
    """Join a set of ranks of which some may die and come back; pass it to `attach` in place of a process group.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as `init_process_group` does; do not call that one. A process that
    is started again with the same RANK continues where the others are: it gets their model and their step.

    The ranks find one another through a store at MASTER_ADDR. If none answers there, rank 0 starts one in a process of its
    own, which outlives rank 0. If that process or its machine dies, all ranks end with an error: choose a machine that stays.

    A rank that dies is left out at once; a rank that is cut off or frozen, after `silence` seconds.
    """
    rank, size, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    if not 0 <= rank < size:
        raise AttachError(f"RANK is {rank} and WORLD_SIZE is {size}: set RANK to a number from 0 to {size - 1}")
    if rank == 0 and not _answers(host, port):
        command = [sys.executable, "-m", "gossamer.fabrics.liveness.store_server", str(port), str(size)]
        quiet = subprocess.DEVNULL
        _started.append(subprocess.Popen(command, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet))
    store = TCPStore(host, port, None, False, timedelta(seconds=300), wait_for_workers=False)
    return Members(store, rank, size, silence)


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise AttachError(
            f"the environment variable {name} is {value!r}, not a number: members() reads RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT; start each process with its own RANK, for instance "
            "RANK=2 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python train.py"
        )
    return int(value)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5.0):
            return True
    except OSError:
        return False


def hold(port: int, size: int) -> None:
    """Host a store until no rank needs it."""
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=300), wait_for_workers=False)
    reader, beats, since = Members(store, 0, size), dict[int, str](), time.monotonic()
    while True:
        time.sleep(1.0)
        before, beats = beats, reader.beats()
        if beats != before:
            since = time.monotonic()
        over = len(beats) == size and all(text.endswith(LEFT) for text in beats.values())
        if time.monotonic() - since > (REST if over else PATIENCE):
            return


if __name__ == "__main__":
    hold(int(sys.argv[1]), int(sys.argv[2]))
