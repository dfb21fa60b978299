"""The command line; `pip install '.[cli]'` in the clone installs its dependencies."""

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType
from typing import NoReturn

from gossamer.core.process_exit import exit_in_order

# Windows has no SIGHUP.
_ENDINGS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
at_end = ExitStack()  # what a command gives back when it ends
_heard = list[int]()  # the signal that ended the command: the command line parser turns each into exit code 130


def entry() -> NoReturn:
    """Entry point of the program `gossamer`."""
    exit_in_order(main())  # a closed pipe or a full disk has been handled


def main() -> int:
    """Run a command and return its exit code. A missing package or an error of ours is one line on stderr."""
    _when_asked_to_end(_leave)  # until work begins: an exception may be lost while torch loads
    _make_output_safe()
    try:
        return _run()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader of our output has closed the pipe
        return 1
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename:
            print(f"gossamer: {error.filename}: {error.strerror}", file=sys.stderr)
            return 1
        if error.errno not in _FULL:
            raise
        print(f"gossamer: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _run() -> int:
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        print(f"the command line needs {error.name}: pip install '.[cli]' in the clone", file=sys.stderr)
        return 1
    from gossamer.bench.cli.app import run

    code = run()
    sys.stdout.flush()
    _when_asked_to_end(_leave)  # nothing is left to clean up
    return _interrupted() if _heard else code


def work_begins() -> None:
    """From now on a signal ends the command in order, since there may be ranks to stop."""
    _when_asked_to_end(_stop)


def _when_asked_to_end(do: Callable[[int, FrameType | None], None]) -> None:
    for number in _ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, do)


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once, since nothing has been started; Python would print a traceback."""
    with suppress(OSError):  # stderr may be closed
        os.write(2, f"{_interruption(number)}\n".encode())
    os._exit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    """End the command in order at the first signal, and ignore further ones."""
    _heard.append(number)
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _interrupted() -> int:
    """Print the signal, and return 130 for ctrl-C, 143 for SIGTERM."""
    number = _heard[0] if _heard else signal.SIGINT
    print(_interruption(number), file=sys.stderr)
    return 128 + number


def _interruption(number: int) -> str:
    return f"gossamer: interrupted by {signal.Signals(number).name}"


def _make_output_safe() -> None:
    """Let closed streams and unknown characters raise no error, and print warnings as one line."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # started with `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _in_one_line


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return f"warning: {message}\n"
