"""No process of a trial outlives the one that started it."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel for a signal when the parent ends, however it ends. `parent`: who it should be, if not gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if parent is not None and os.getppid() != parent:
        sys.exit(128 + number)


def end(process: "subprocess.Popen[str]") -> None:
    """End a launcher with a session of its own. It first gets to end its ranks; when killed, the kernel kills those left."""
    for how, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        if process.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
