"""The launcher of ranks on this machine: torch's own, in a process that says which rank failed.

`python -m gossamer.trial.local PARENT OPTIONS...`, with the options of torchrun.
"""

import json
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from gossamer.trial.orphans import end_with_parent
from gossamer.trial.plan import MARK


def main(parent: str, *options: str) -> int:
    """Exit code 1 if a rank failed, 128 and the number of a signal that ended us."""
    end_with_parent(signal.SIGTERM, int(parent))
    try:
        run(parse_args(list(options)))
    except ChildFailedError as error:
        rank, code = _first(error)
        print(MARK + json.dumps({"event": "lost", "rank": rank, "code": code}), flush=True)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _first(error: ChildFailedError) -> tuple[int, int]:
    """The rank that failed first. One that was killed comes before those that only noticed; we end them by SIGTERM."""
    killed = {r: f for r, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    failures = killed or error.failures
    rank = min(failures, key=lambda r: failures[r].timestamp)
    return rank, failures[rank].exitcode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
