"""The command line. `pip install 'gossamer[cli]'` brings what it needs."""

import os
import signal
import sys
from types import FrameType

_ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def main() -> None:
    """The entry point: says how to install what is missing, and turns our errors into one line and an exit code."""
    _end_in_order_when_asked()
    try:
        sys.exit(_run())
    except KeyboardInterrupt as stop:
        sys.exit(128 + int(stop.args[0] if stop.args else signal.SIGINT))
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


if __name__ == "__main__":
    main()
