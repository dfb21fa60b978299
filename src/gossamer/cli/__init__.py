"""The command line. `pip install 'gossamer[cli]'` brings what it needs."""

import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from gossamer.core.process_exit import exit_in_order

_ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_heard = list[int]()  # the signal that asked us to end: the command line parser makes a plain 130 of each


def entry() -> NoReturn:
    """What is started as `gossamer`."""
    exit_in_order(main())  # a reader that has left, or a full disk, has been told of


def main() -> int:
    """A command's exit code. It says how to install what is missing, and turns our errors into one line."""
    _when_asked_to_end(_leave)  # until work begins: torch takes a second to load, and an exception may be lost in it
    _let_nothing_unspeakable_end_us()
    try:
        return _run()
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # whoever read our output has seen enough
        return 1
    except OSError as error:
        if error.errno not in _FULL:
            raise
        print(f"gossamer: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        return 1


def _run() -> int:
    try:
        import rich  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import typer  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        print(f"the command line needs {error.name}: pip install 'gossamer[cli]'", file=sys.stderr)
        return 1
    from gossamer.cli.app import run

    code = run()
    sys.stdout.flush()
    _when_asked_to_end(_leave)  # there is nothing left to put in order
    return _interrupted() if _heard else code


def work_begins() -> None:
    """From now on there may be something to put in order before we end."""
    _when_asked_to_end(_stop)


def _when_asked_to_end(do: Callable[[int, FrameType | None], None]) -> None:
    for number in _ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, do)


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing has been started: end at once. Python's own way out would show where it was."""
    with suppress(OSError):  # nobody may be there to read it
        os.write(2, f"{_farewell(number)}\n".encode())
    os._exit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    """The first request ends everything in order, within seconds; further ones would only leave things lying about."""
    _heard.append(number)
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _interrupted() -> int:
    """Say so; the exit code is 130 for ctrl-C, 143 for SIGTERM."""
    number = _heard[0] if _heard else signal.SIGINT
    print(_farewell(number), file=sys.stderr)
    return 128 + number


def _farewell(number: int) -> str:
    return f"gossamer: interrupted by {signal.Signals(number).name}"


def _let_nothing_unspeakable_end_us() -> None:
    """Output may be closed, or know fewer characters than our ranks and their users; a warning is a line, not code."""
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


if __name__ == "__main__":
    entry()
