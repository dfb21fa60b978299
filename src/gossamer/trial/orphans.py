"""No process of a trial outlives the one that started it."""

import ctypes
import os
import signal
import sys

PARENT = "GOSSAMER_PARENT"  # the environment's name for the process that must not be outlived
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill us when our parent ends, however it ends; leave at once if it is gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit(128 + signal.SIGKILL)
