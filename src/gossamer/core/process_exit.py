"""How a process of ours ends: at once. To take torch down piece by piece would cost another second."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_in_order(code: int) -> NoReturn:
    """All is done; what others want to do at the exit of Python is done too."""
    atexit._run_exitfuncs()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """All that was said is out, and nothing else happens any more: no thread that is left keeps the process."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a reader that has left, or a full disk: there is nobody to tell
            stream.flush()
    os._exit(code)
