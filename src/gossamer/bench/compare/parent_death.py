"""End a rank when its parent process ends: `python .../parent_death.py MODULE ARGUMENTS...` runs a rank's module.

This file is run by path and imports only the standard library: loading torch takes seconds, in which the parent may die.
"""

import ctypes
import os
import runpy
import signal
import sys

PARENT = "GOSSAMER_PARENT"  # environment variable with the process id of the parent
_PR_SET_PDEATHSIG = 1


def program(module: str, *arguments: str) -> list[str]:
    """Command that runs a module as a rank which ends with its parent."""
    return [sys.executable, "-W", "ignore", __file__, module, *arguments]


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; exit at once if the parent is gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    sys.path[0] = os.getcwd()  # as under `python -m`, instead of the folder of this file
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
