"""The launcher of ranks on this machine: torch's own, in a process that says which rank failed, or stood still.

`python -m gossamer.trial.local PARENT OPTIONS...`, with the options of torchrun.
"""

import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.run import parse_args, run

from gossamer.core.errors import plainly
from gossamer.trial.orphans import end_with_parent
from gossamer.trial.plan import MARK


def main(parent: str, *options: str) -> int:
    """Exit code 1 if a rank failed, 128 and the number of a signal that ended us."""
    signal.signal(signal.SIGTERM, _end)  # until torch listens itself
    end_with_parent(signal.SIGTERM, int(parent))
    logging.disable(logging.ERROR)  # we say ourselves what became of a rank
    _wake_before_the_end()
    # Torch writes logs, and leaves them where they are unless told a place. It is ours to remove: we outlive our parent.
    with TemporaryDirectory(prefix="gossamer-") as logs:
        return _run(["--log-dir", logs, *options])


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(options: list[str]) -> int:
    try:
        run(parse_args(options))
    except ChildFailedError as error:
        rank, code = _first(error)
        _tell("lost", rank=rank, code=code)
        return 1
    except RendezvousError as error:
        _tell("broken", error=f"no rank could be started, is the loopback interface up? {plainly(error)}")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _tell(event: str, **facts: Any) -> None:
    print(MARK + json.dumps({"event": event, **facts}), flush=True)


def _wake_before_the_end() -> None:
    """A rank that was stopped, say by SIGSTOP, does not hear SIGTERM, and torch would wait for it half a minute."""
    close = PContext.close

    def close_awake(self: PContext, *args: Any, **kwargs: Any) -> None:
        for rank, pid in self.pids().items():
            if _is_stopped(pid):
                _tell("lost", rank=rank, code=-signal.SIGSTOP)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        close(self, *args, **kwargs)

    PContext.close = close_awake


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # it has ended, or this is no Linux
        return False


def _first(error: ChildFailedError) -> tuple[int, int]:
    """The rank that failed first. One that was killed comes before those that only noticed; we end them by SIGTERM."""
    killed = {r: f for r, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    failures = killed or error.failures
    rank = min(failures, key=lambda r: failures[r].timestamp)
    return rank, failures[rank].exitcode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
