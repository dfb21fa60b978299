"""What every rank of a script's trial runs: `gossamer.trial.script ORDERS`, in JSON. It runs the script, and tells how it fares.

The script is as it is: this module is its `python`, and hears of its training from `attach` or `ddp.register`.
"""

import atexit
import faulthandler
import json
import os
import runpy
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed import DistBackendError, DistNetworkError
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gossamer.core import offered
from gossamer.core.errors import AttachError, PeerError
from gossamer.hosts.metrics import Meter
from gossamer.hosts.orders import DDP, PLAIN, VARIABLE, Overseer, Watch
from gossamer.lab import in_lab, own_counters
from gossamer.recipe import Recipe
from gossamer.record import Step
from gossamer.trial.plan import MARK

REFUSED, STOOD_STILL = 2, 124  # exit codes
START = 300.0  # seconds at least until a script attaches: it may have data to read
LINES = 4  # of a stack, at either end
AGAIN = 5.0  # seconds after which who cannot even say that it stands still is ended
WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/_tensor.py", "/torch/nn/parallel/", "/gossamer/")


@dataclass
class Orders:
    """What a rank is to do; written once by the launcher."""

    script: str
    arguments: list[str]
    recipe: str
    deadline: float
    per_host: int = 1
    imports: list[str] = field(default_factory=list[str])

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def tell(event: str, **facts: Any) -> None:
    """One line; on a line of its own, whatever the script has printed without an end."""
    sys.stdout.write(f"{MARK}{json.dumps({'event': event, **facts})}\n")
    sys.stdout.flush()


class Overlooker(Overseer):
    """Watches one rank's training: its clock begins when it has attached."""

    def __init__(self, orders: Orders) -> None:
        self.orders, self.deadline, self.name = orders, orders.deadline, Path(orders.script).name
        self.meter: Meter | None = None
        self.refused = ""
        self.losses = list[float]()  # told since the last row
        self.told_any = False
        self.last = 0  # the step of the last row
        self.alive = monotonic() + max(0.0, START - orders.deadline)

    # ---- what attach and register say

    def take(self, given: Recipe | str | None, ordered: str) -> None:
        if self.meter is not None:
            self.refuse(
                f"{self.name} attaches twice, and a comparison follows one model: put all in one module, such as "
                "nn.ModuleList([...]), and attach that"
            )
        if given is not None and (ordered in PLAIN or Recipe.of(given) != Recipe.of(ordered)):
            self.refuse(
                f"{self.name} names its recipe itself ({given}), so every run would be the same: leave it out, "
                "gossamer.attach(model, optimizer) takes the one that is compared"
            )

    def begin(self, meter: Meter, kind: str) -> None:
        self.meter, self.kind = meter, kind
        meter.ledger.per_node = self.orders.per_host
        worker, self.before = meter.worker, (meter.ledger.between, meter.ledger.inside, meter.ledger.handed)
        self.dense = sum(c.layout.numel * c.layout.dtype.itemsize for c in worker.channels)
        self.nic, self.marks = _nic(), self._meters()
        self.alive, self.began = monotonic(), perf_counter()
        tell(
            "attached",
            recipe=kind or repr(worker.origin),
            parameters=sum(leaf.parameter.numel() for leaf in worker.leaves.values()),
        )

    def stepped(self) -> None:
        self.alive = monotonic()
        if self.losses:
            self._row()

    def told(self, name: str, value: float) -> None:
        self.alive, self.told_any = monotonic(), True
        if name == "held_out":
            sent = self._sent() if self.orders.per_host == 1 else None
            tell("evaluation", step=self._step, seconds=self._clock(), sent=sent, quality=value)
            return
        self.losses.append(value)
        self._row()

    def refuse(self, why: str) -> None:
        """What cannot be compared is not worth another step."""
        self.refused = self.refused or why
        raise AttachError(why)

    # ---- what becomes of it

    def unattached_step(self, *of: Any) -> None:
        if self.meter is None:
            self.refuse(
                f"{self.name} steps an optimizer before it attaches: put comm = gossamer.attach(model, optimizer), or after "
                "DistributedDataParallel(...) comm = gossamer.ddp.register(model), before the training loop"
            )

    def finish(self) -> None:
        """The script has ended well; did it train what can be compared?"""
        if self.meter is None:
            self.refuse(
                f"{self.name} ended and never attached: put comm = gossamer.attach(model, optimizer), or after "
                "DistributedDataParallel(...) comm = gossamer.ddp.register(model), before its training loop"
            )
        if not self._step:
            self.refuse(
                f"{self.name} attached, and ended without one step of its optimizer: there is nothing to compare"
            )
        self._row()
        links = {"wire_bytes": self._sent(), "inside_bytes": self._inside(), "logical_bytes": self._handed()}
        tell("end", told=self.told_any, nic_bytes=_nic() - self.nic if in_lab() else None, **links)

    def _row(self) -> None:
        """A row for the step done, with means over those since the last row: many a script tells a loss now and then."""
        steps = self._step - self.last
        if steps < 1:
            return
        row = Step(self._step, self._clock(), fmean(self.losses) if self.losses else nan, None)
        row.sent = self._sent() if self.orders.per_host == 1 else None
        if self.kind != DDP:
            now, before, self.marks = self._meters(), self.marks, self._meters()
            row.wait, row.codec = (now[1] - before[1]) / steps, (now[2] - before[2]) / steps
            row.compute = (now[0] - before[0]) / steps - row.wait
        self.losses, self.last = [], self._step
        tell("step", **asdict(row))

    @property
    def _step(self) -> int:
        return self.meter.worker.step - 1 if self.meter else 0

    def _clock(self) -> float:
        return perf_counter() - self.began

    def _meters(self) -> tuple[float, float, float]:
        assert self.meter is not None
        return perf_counter(), self.meter.exposed_seconds, self.meter.ledger.busy_seconds

    def _ring(self) -> int:
        """What DDP's all-reduces have put on one rank's link: it keeps no ledger."""
        assert self.meter is not None
        size = self.meter.worker.size
        return 2 * (size - 1) * self.dense // size * self._step

    def _sent(self) -> int:
        assert self.meter is not None
        if self.kind != DDP:
            return self.meter.ledger.between - self.before[0]
        per_host = self.orders.per_host
        return self._ring() // per_host if self.meter.worker.size > per_host else 0

    def _inside(self) -> int:
        assert self.meter is not None
        return self._ring() - self._sent() if self.kind == DDP else self.meter.ledger.inside - self.before[1]

    def _handed(self) -> int:
        assert self.meter is not None
        return self.dense * self._step if self.kind == DDP else self.meter.ledger.handed - self.before[2]


def _nic() -> int:
    return own_counters().sent_bytes if in_lab() else 0


class Warden(threading.Thread):
    """Ends a rank that neither stepped nor told anything for too long, and says where it stood."""

    def __init__(self, overlooker: Overlooker) -> None:
        super().__init__(daemon=True)
        self.overlooker, self.over = overlooker, threading.Event()
        self.main = threading.main_thread().ident

    def run(self) -> None:
        deadline = self.overlooker.deadline
        faulthandler.dump_traceback_later(deadline + AGAIN, exit=True)
        while not self.over.wait(min(1.0, deadline / 4)):
            left = self.overlooker.alive + deadline - monotonic()
            if left <= 0:
                self._end()
            faulthandler.dump_traceback_later(left + AGAIN, exit=True)  # for code that does not let threads run
        faulthandler.cancel_dump_traceback_later()

    def _print(self, frames: list[FrameType]) -> None:
        """From the script's own line inwards."""
        script = self.overlooker.orders.script
        last = max((i for i, f in enumerate(frames) if f.f_code.co_filename == script), default=len(frames) - 1)
        said = traceback.StackSummary.extract((f, f.f_lineno) for f in reversed(frames[: last + 1])).format()
        print("".join(said if len(said) <= 2 * LINES else [*said[:LINES], "  ...\n", *said[-LINES:]]), file=sys.stderr)

    def _end(self) -> None:
        frame = sys._current_frames().get(self.main or 0)
        files = [f.f_code.co_filename for f in _frames(frame)]
        waits = bool(files) and any(part in name for name in files for part in WAITING if name != __file__)
        where = next((f for f in _frames(frame) if f.f_code.co_filename == self.overlooker.orders.script), None)
        place = f" at line {where.f_lineno} of {self.overlooker.name}" if where else ""
        deadline, doing = self.overlooker.deadline, "waited for other ranks" if waits else "stood still"
        told = f"{doing}{place}: no step and no word for {deadline:g} s; if it was at work, give a longer --deadline"
        self._print(_frames(frame))
        sys.stderr.flush()
        with suppress(OSError):
            tell("died", error=told, missed=waits)
        os._exit(STOOD_STILL)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """The innermost first, down to the script's own; what is below runs the script."""
    out = list[FrameType]()
    while frame is not None and frame.f_code.co_filename != __file__:
        out.append(frame)
        frame = frame.f_back
    return out


def run(orders: Orders) -> int:
    """Run the script under its recipe; returns the exit code."""
    torch.set_num_threads(1)
    os.environ[VARIABLE] = orders.recipe
    for each in orders.imports:
        offered.bring(each)
    overlooker = Overlooker(orders)
    Watch.overseer = overlooker
    unattached = register_optimizer_step_pre_hook(overlooker.unattached_step)
    warden = Warden(overlooker)
    warden.start()
    try:
        _run_as_main(orders)
        overlooker.finish()
    except BaseException as error:
        return _account_for(error, overlooker)
    finally:
        warden.over.set()
        unattached.remove()
        Watch.overseer = None
    return 0


def _run_as_main(orders: Orders) -> None:
    sys.argv = [orders.script, *orders.arguments]
    sys.path[0] = str(Path(orders.script).parent)
    try:
        runpy.run_path(orders.script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def _account_for(error: BaseException, overlooker: Overlooker) -> int:
    if overlooker.refused:
        tell("refused", error=overlooker.refused)
        return REFUSED
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename != overlooker.orders.script:
        trace = trace.tb_next
    told = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        told = f"it ended itself with {error.code!r}"
    else:
        traceback.print_exception(error.with_traceback(trace or error.__traceback__))
    sys.stderr.flush()
    missed = isinstance(error, PeerError | DistBackendError | DistNetworkError) or "gloo" in str(error)
    place = f" (line {trace.tb_lineno} of {overlooker.name})" if trace else ""
    tell("died", error=" ".join(told.split())[:1000] + place, missed=missed)
    return 1


def main(text: str) -> NoReturn:
    """Run as a process of its own."""
    code = run(Orders(**json.loads(text)))
    if not code:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the script left behind, such as threads and process groups, must not keep its rank


if __name__ == "__main__":
    main(sys.argv[1])
