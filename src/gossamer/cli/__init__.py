"""The command line. `pip install 'gossamer[cli]'` brings what it needs."""

import errno
import io
import os
import signal
import sys
import warnings
from types import FrameType

_ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main() -> None:
    """The entry point: says how to install what is missing, and turns our errors into one line and an exit code."""
    _end_in_order_when_asked()
    _let_nothing_unspeakable_end_us()
    try:
        sys.exit(_run())
    except KeyboardInterrupt as stop:
        sys.exit(128 + int(stop.args[0] if stop.args else signal.SIGINT))
    except BrokenPipeError:  # whoever read our output has seen enough
        _drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        print(f"gossamer: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(1)


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
    return code


def _end_in_order_when_asked() -> None:
    for number in _ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    """The first request ends everything in order, within seconds; further ones would only leave things lying about."""
    for each in _ENDINGS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


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


def _drop_output() -> None:
    """What is still in the buffer would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
