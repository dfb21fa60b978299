"""Ends a process at once: a regular shutdown of torch would take another second."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def exit_in_order(code: int) -> NoReturn:
    """Run the `atexit` handlers, then exit at once."""
    atexit._run_exitfuncs()
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Flush the output and exit at once; remaining threads do not delay it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # a closed pipe or a full disk: the error cannot be reported
            stream.flush()
    os._exit(code)
