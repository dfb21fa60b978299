"""No process of a trial outlives the one that started it: `python .../orphans.py MODULE ARGUMENTS...` runs a rank's module.

It is run by path, as a script that imports the standard library alone: while torch is loading, which takes seconds, a rank
would not notice that it is alone.
"""

import ctypes
import os
import runpy
import signal
import sys

PARENT = "GOSSAMER_PARENT"  # the environment's name for the process that must not be outlived
_PR_SET_PDEATHSIG = 1


def program(module: str, *arguments: str) -> list[str]:
    """The command that runs a module as one of a trial's ranks."""
    return [sys.executable, "-W", "ignore", __file__, module, *arguments]


def end_with_parent() -> None:
    """Ask the kernel to kill us when our parent ends, however it ends; leave at once if it is gone already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent()
    sys.path[0] = os.getcwd()  # as under `python -m`: our own folder is no place to import from
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
