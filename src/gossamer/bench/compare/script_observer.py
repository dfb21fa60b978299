"""Watches one rank's training by a script, and tells the launcher how it fares."""

import json
import sys
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gossamer.bench.compare.plan import MARK
from gossamer.bench.lab import in_lab, own_counters
from gossamer.bench.record import Step
from gossamer.core.errors import AttachError
from gossamer.integrations.metrics import Meter
from gossamer.integrations.run_observer import DDP, PLAIN, RunObserver
from gossamer.recipe import Recipe

START = 300.0  # seconds at least until a script attaches: it may have data to read


@dataclass
class ScriptSpec:
    """What a rank is to do; written once by the launcher."""

    script: str
    arguments: list[str]
    recipe: str
    deadline: float
    per_host: int = 1
    imports: list[str] = field(default_factory=list[str])
    steps: int = 0  # to end it after; 0: it ends by itself
    folder: str = ""  # to run it in; else where the command was given
    began: float = 0.0  # when the comparison did, as time.time() says it

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def tell(event: str, **facts: Any) -> None:
    """One line; on a line of its own, whatever the script has printed without an end."""
    sys.stdout.write(f"{MARK}{json.dumps({'event': event, **facts})}\n")
    sys.stdout.flush()


class Enough(SystemExit):
    """The steps that were asked for are done: the script ends here, as if it had said so itself."""


class ScriptObserver(RunObserver):
    """Watches one rank's training: its clock begins when it has attached.

    A script need not tell a loss: until it does, the sum of what it calls backward() on is told in its place.
    """

    def __init__(self, spec: ScriptSpec) -> None:
        self.spec, self.deadline, self.name = spec, spec.deadline, Path(spec.script).name
        self.meter: Meter | None = None
        self.refused = ""
        self.losses = list[float]()  # told since the last row
        self.heard = list[Tensor]()  # what backward() was called on in this step
        self.told_any = False
        self.totals = dict[str, int | None]()  # as they were after the last step, if its number was given
        self.last = 0  # the step of the last row
        self.alive = monotonic() + max(0.0, START - spec.deadline)

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
        meter.ledger.per_node = self.spec.per_host
        worker, self.before = meter.worker, (meter.ledger.between, meter.ledger.inside, meter.ledger.handed)
        self.dense = sum(c.layout.numel * c.layout.dtype.itemsize for c in worker.buckets)
        self.size = dist.get_world_size() if kind == DDP and dist.is_initialized() else worker.size
        self.nic, self.first = _nic(), self._meters()
        self.marks = self.first
        self.alive, self.began = monotonic(), perf_counter()
        tell(
            "attached",
            recipe=kind or repr(worker.origin),
            parameters=sum(param.parameter.numel() for param in worker.params.values()),
        )

    def stepped(self) -> None:
        self.alive = monotonic()
        heard, self.heard = self.heard, []
        if self.losses:
            self._row()
        elif heard and not self.told_any:
            self._row("heard", sum(float(loss) for loss in heard))
        if self._step == self.spec.steps:  # what comes after is not of these steps, such as the next gradients
            self.totals = self._links()

    def told(self, name: str, value: float) -> None:
        self.alive = monotonic()
        if name == "held_out":
            sent = self._sent() if self.spec.per_host == 1 else None
            tell("evaluation", step=self._step, seconds=self._clock(), sent=sent, quality=value)
            return
        if not self.told_any:  # what was heard until now does not count
            self.told_any, self.last, self.marks = True, 0, self.first
        self.losses.append(value)
        self._row()

    def hear(self, loss: Tensor) -> None:
        """The script calls backward() on a loss."""
        if self.meter is not None and not self.told_any:
            self.heard.append(loss)

    def refuse(self, why: str) -> None:
        """What cannot be compared is not worth another step."""
        self.refused = self.refused or why
        raise AttachError(why)

    # ---- what becomes of it

    def before_step(self, *of: Any) -> None:
        """An optimizer is about to step."""
        if self.spec.steps and self._step >= self.spec.steps:
            raise Enough
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
        tell("end", compiled=_has_compiled(), **(self.totals or self._links()))

    def _row(self, event: str = "step", loss: float = nan) -> None:
        """A row for the step done, with means over those since the last row: many a script tells a loss now and then."""
        steps = self._step - self.last
        if steps < 1:
            return
        row = Step(self._step, self._clock(), fmean(self.losses) if self.losses else loss, None)
        row.sent = self._sent() if self.spec.per_host == 1 else None
        if self.kind != DDP:
            before, self.marks = self.marks, self._meters()
            seconds, row.wait, row.codec = ((now - then) / steps for now, then in zip(self.marks, before, strict=True))
            row.compute = seconds - row.wait
        self.losses, self.last = [], self._step
        tell(event, **asdict(row))

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
        return 2 * (self.size - 1) * self.dense // self.size * self._step

    def _sent(self) -> int:
        assert self.meter is not None
        if self.kind != DDP:
            return self.meter.ledger.between - self.before[0]
        per_host = self.spec.per_host
        return self._ring() // per_host if self.size > per_host else 0

    def _inside(self) -> int:
        assert self.meter is not None
        return self._ring() - self._sent() if self.kind == DDP else self.meter.ledger.inside - self.before[1]

    def _links(self) -> dict[str, int | None]:
        nic = _nic() - self.nic if in_lab() else None
        sent = {"wire_bytes": self._sent(), "inside_bytes": self._inside(), "logical_bytes": self._handed()}
        return {"nic_bytes": nic, **sent}

    def _handed(self) -> int:
        assert self.meter is not None
        return self.dense * self._step if self.kind == DDP else self.meter.ledger.handed - self.before[2]


def _has_compiled() -> bool:
    """torch.compile takes long once, and the runs that follow find what it has left."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(dynamo, "counters", {}).get("frames"))


def _nic() -> int:
    return own_counters().sent_bytes if in_lab() else 0
