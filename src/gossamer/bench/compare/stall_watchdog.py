"""End a rank that makes no step and logs nothing for too long, and report where it stood."""

import faulthandler
import os
import sys
import threading
import traceback
from contextlib import suppress
from time import monotonic
from types import FrameType
from typing import final

from gossamer.bench.compare.events import RankEvent, ScriptDied, tell
from gossamer.bench.compare.script_observer import ScriptObserver

STOOD_STILL = 124  # the exit code
LINES = 4  # lines of a stack that are shown, at either end
AGAIN = 5.0  # seconds after which a rank that cannot report its stall is ended
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/_tensor.py", "/torch/nn/parallel/", "/gossamer/")


@final
class StallWatchdog(threading.Thread):
    """Thread that ends a rank which makes no step and logs nothing for `deadline` seconds."""

    def __init__(self, observer: ScriptObserver, runner: str) -> None:
        super().__init__(daemon=True)
        self.observer, self.over = observer, threading.Event()
        self.runner = runner  # the file that runs the script: its frames and those below are not the script's
        self.main = threading.main_thread().ident

    def run(self) -> None:
        deadline = self.observer.deadline
        faulthandler.dump_traceback_later(deadline + AGAIN, exit=True)
        while not self.over.wait(min(1.0, deadline / 4)):
            left = self.observer.alive + deadline - monotonic()
            if left <= 0:
                self._end()
            faulthandler.dump_traceback_later(left + AGAIN, exit=True)  # for code that holds the GIL
        faulthandler.cancel_dump_traceback_later()

    def _print(self, frames: list[FrameType]) -> None:
        """Print the stack, from the script's own line inwards."""
        script = self.observer.plan.script
        last = max((i for i, f in enumerate(frames) if f.f_code.co_filename == script), default=len(frames) - 1)
        said = traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(frames[: last + 1])).format()
        print("".join(said if len(said) <= 2 * LINES else [*said[:LINES], "  ...\n", *said[-LINES:]]), file=sys.stderr)

    def _end(self) -> None:
        frames = self._frames(sys._current_frames().get(self.main or 0))
        waits = any(part in f.f_code.co_filename for f in frames for part in WAITING)
        where = next((f for f in frames if f.f_code.co_filename == self.observer.plan.script), None)
        place = f" at line {where.f_lineno} of {self.observer.name}" if where else ""
        deadline, doing = self.observer.deadline, "waited for other ranks" if waits else "stood still"
        told = (
            f"{doing}{place}: no step and no log for {deadline:g} s; if it was still working, give a longer --deadline"
        )
        self._print(frames)
        sys.stderr.flush()
        with suppress(OSError):
            tell(RankEvent(ScriptDied(told, waits)))
        os._exit(STOOD_STILL)

    def _frames(self, frame: FrameType | None) -> list[FrameType]:
        """Frames from the innermost to the script's own; frames below run the script."""
        out = list[FrameType]()
        while frame is not None and frame.f_code.co_filename != self.runner:
            out.append(frame)
            frame = frame.f_back
        return out
