"""What listens where while commands run: `python -m campaigns.listening`, from the repository's root.

Starts each command as a user would, looks at the sockets of all its processes until it has seen every rank listen, and
prints what was seen. The exit code is 1 if another machine could have reached any of it, or if a command ended or
was stopped before that: its sockets would be unknown.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.listening import Listener, listeners
from tests.marked import Marked

from gossamer.bench.lab import available

COMMAND = [sys.executable, "-m", "gossamer.bench.cli"]
RANKS = 2
FOREVER = ("--workload", "ridge", "--hosts", str(RANKS), "--steps", "1000000")
COMMANDS = [
    ("doctor",),
    ("train", "terngrad", *FOREVER),
    ("compare", "ddp", "qsgd", "osgp", "overlap_local_sgd(8)", *FOREVER),
    ("train", "terngrad", *FOREVER, "--rate", "100mbit"),
    ("lab", "--hosts", str(RANKS), "--", *COMMAND, "train", "terngrad", "--workload", "ridge", "--steps", "1000000"),
]
LONGEST = 90.0  # seconds a command may take to begin
SETTLED = 3.0  # seconds without anything new when all ranks have been seen


def main() -> int:
    wide = unknown = 0
    for words in COMMANDS:
        in_lab = words[0] == "lab" or "--rate" in words
        if in_lab and available() is not None:
            print(f"gossamer {' '.join(words)}: no lab here\n")
            continue
        seen, complete = look(words)
        # A lab is a network of its own, which ends at its bridge: nobody outside reaches what is open inside.
        found = [x for x in seen if x.open_to_others and not in_lab]
        wide += len(found)
        unknown += not complete
        show(words, seen, in_lab)
        if not complete:
            print(f"  not all of {RANKS} ranks were seen to listen\n")
    print(f"{len(COMMANDS)} commands, {wide} sockets that another machine could reach, {unknown} not seen whole")
    return int(wide > 0 or unknown > 0)


def look(words: Sequence[str]) -> tuple[set[Listener], bool]:
    """All that a command's processes have listened on until nothing new came, and whether all ranks were among them."""
    marked, seen, complete = Marked(), set[Listener](), False
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**clean, **marked.label, "PYTHONPATH": str(Path("src").resolve())}
        process = subprocess.Popen(
            [*COMMAND, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        began = news = time.monotonic()
        while process.poll() is None and time.monotonic() < (news + SETTLED if complete else began + LONGEST):
            found = set(listeners(marked.processes()))
            news = news if found <= seen else time.monotonic()
            seen |= found
            complete = len({x.pid for x in seen} - {process.pid}) >= RANKS
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        marked.expect_nothing()
    return seen, complete


def show(words: Sequence[str], seen: set[Listener], in_lab: bool) -> None:
    print(f"gossamer {' '.join(words)}" + " (in a lab: a network of its own)" * in_lab)
    addresses = sorted({(str(x.address), x.open_to_others) for x in seen})
    for address, wide in addresses:
        here = [x for x in seen if str(x.address) == address]
        who = f"{len(here)} socket(s) of {len({x.pid for x in here})} process(es)"
        print(f"  {address}: {who}" + (", OPEN TO OTHER MACHINES" if wide and not in_lab else ""))
    print("" if seen else "  nothing\n")


if __name__ == "__main__":
    sys.exit(main())
