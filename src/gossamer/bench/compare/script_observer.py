"""Observe one rank's training by a script and report its events to the launcher."""

import json
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from math import nan
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gossamer.bench.compare import events
from gossamer.bench.compare.events import RankEvent, tell
from gossamer.bench.compare.parent_death import program
from gossamer.bench.compare.rank_run import Totals
from gossamer.bench.lab import in_lab, lab_bytes
from gossamer.bench.record import Evaluation, Step
from gossamer.core.errors import AttachError
from gossamer.integrations.metrics import Meter
from gossamer.integrations.run_observer import DDP, PLAIN, RunObserver
from gossamer.recipe import Recipe

START = 300.0  # seconds a script has at least until it attaches: it may have data to read


@dataclass
class ScriptPlan:
    """What to run: the script, its arguments and the recipes. The launcher chooses the hosts; a rank gets one recipe."""

    script: str
    arguments: list[str]
    contenders: dict[str, str]
    deadline: float = 120.0
    chunk: int = 5  # steps that a training loss is averaged over, at least
    per_host: int = 1
    imports: list[str] = field(default_factory=list[str])
    steps: int = 0  # end every run after so many steps; 0: when the script ends
    folder: str = ""  # to run the script in; empty: the current folder
    began: float = field(default_factory=time)  # when the comparison began

    def same_on_all(self) -> dict[str, Any]:
        """What all ranks of a launcher must have been given alike; the script may lie elsewhere on each machine."""
        return {
            "recipes": list(self.contenders.values()),
            "script": Path(self.script).name,
            "arguments": self.arguments,
            "steps": self.steps,
        }

    def of(self, name: str) -> "ScriptPlan":
        """The plan of one run. In the script's arguments and its folder, {recipe} becomes the run's file name."""
        file = re.sub(r"[^A-Za-z0-9_.=]+", "-", name).strip("-.")
        said, folder = [a.replace("{recipe}", file) for a in self.arguments], self.folder.replace("{recipe}", file)
        return replace(self, arguments=said, folder=folder, contenders={name: self.contenders[name]})

    def command(self, name: str) -> list[str]:
        """Command of one rank of a run."""
        return program("gossamer.bench.compare.script_rank", json.dumps(asdict(self.of(name))))


class Enough(SystemExit):
    """Ends the script after the requested number of steps, as if it had called sys.exit()."""


class ScriptObserver(RunObserver):
    """Observes one rank's training. The clock begins when the script has attached.

    Until the script logs a loss, the sum of the values that it calls backward() on is reported instead.
    """

    def __init__(self, plan: ScriptPlan) -> None:
        self.plan, self.deadline, self.name = plan, plan.deadline, Path(plan.script).name
        self.meter: Meter | None = None
        self.refused = ""
        self.losses = list[float]()  # logged since the last reported step
        self.backward_losses = list[Tensor]()  # values that backward() was called on in this step
        self.has_logged = False
        self.totals = dict[str, int | None]()  # byte counts after the last step, if the number of steps is limited
        self.last = 0  # the last reported step
        self.decided = 0  # decisions of a controller that were reported
        self.alive = monotonic() + max(0.0, START - plan.deadline)

    # ---- called by attach and register

    def take(self, given: Recipe | str | None, ordered: str) -> None:
        if self.meter is not None:
            self.refuse(
                f"{self.name} attaches twice, and a comparison follows one model: put all models in one module, such as "
                "nn.ModuleList([...]), and attach that"
            )
        if given is not None and (ordered in PLAIN or Recipe.of(given) != Recipe.of(ordered)):
            self.refuse(
                f"{self.name} passes its own recipe ({given}), so every run would be the same: leave it out, "
                "gossamer.attach(model, optimizer) takes the recipe that is compared"
            )

    def begin(self, meter: Meter, kind: str) -> None:
        self.meter, self.kind = meter, kind
        meter.ledger.per_node = self.plan.per_host
        worker, self.before = meter.worker, Totals.of(meter.ledger)
        self.dense = sum(c.layout.numel * c.layout.dtype.itemsize for c in worker.buckets)
        self.size = dist.get_world_size() if kind == DDP and dist.is_initialized() else worker.size
        self.nic, self.first = lab_bytes(), self._meters()
        self.marks = self.first
        self.alive, self.began = monotonic(), perf_counter()
        parameters = sum(param.parameter.numel() for param in worker.params.values())
        tell(RankEvent(events.ScriptAttached(kind or repr(worker.origin), parameters)))

    def stepped(self) -> None:
        self.alive = monotonic()
        self._tell_decisions()
        losses, self.backward_losses = self.backward_losses, []
        if self.losses:
            self._row()
        elif losses and not self.has_logged:
            self._row(events.UnloggedStep, sum(float(loss) for loss in losses))
        if self._step == self.plan.steps:  # bytes sent later, such as the next gradients, do not belong to these steps
            self.totals = self._links()

    def _tell_decisions(self) -> None:
        """Report what the recipe's controller has decided since the last step, in its own words."""
        assert self.meter is not None
        decisions = self.meter.ledger.decisions
        for made in decisions[self.decided :]:
            tell(RankEvent(events.RecipeChange(made.step, made.decision)))
        self.decided = len(decisions)

    def told(self, name: str, value: float) -> None:
        self.alive = monotonic()
        if name == "held_out":
            tell(RankEvent(Evaluation(self._step, self._clock(), self._sent(), value)))
            return
        if not self.has_logged:  # values of backward() reported so far do not count
            self.has_logged, self.last, self.marks = True, 0, self.first
        self.losses.append(value)
        self._row()

    def note_backward(self, loss: Tensor) -> None:
        """Take a loss that the script calls backward() on."""
        if self.meter is not None and not self.has_logged:
            self.backward_losses.append(loss)

    def refuse(self, why: str) -> None:
        """Stop the script with an error that says why it cannot be compared."""
        self.refused = self.refused or why
        raise AttachError(why)

    # ---- steps and the end

    def before_step(self, *of: Any) -> None:
        """Hook before an optimizer step: end the script if it has had its steps, refuse a script that did not attach."""
        if self.plan.steps and self._step >= self.plan.steps:
            raise Enough
        if self.meter is None:
            self.refuse(
                f"{self.name} steps an optimizer before it attaches: put comm = gossamer.attach(model, optimizer), or after "
                "DistributedDataParallel(...) comm = gossamer.ddp.register(model), before the training loop"
            )

    def finish(self) -> None:
        """Report the end of the script, or refuse it if it did not attach or made no step."""
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
        tell(RankEvent(events.ScriptEnded(**(self.totals or self._links()), compiled=_has_compiled())))

    def _row(self, kind: type[Step] = Step, loss: float = nan) -> None:
        """Report the last step, with means over the steps since the last report: a script may log a loss rarely."""
        steps = self._step - self.last
        if steps < 1:
            return
        row = kind(self._step, self._clock(), fmean(self.losses) if self.losses else loss, self._sent())
        if self.kind != DDP:
            before, self.marks = self.marks, self._meters()
            seconds, row.wait, row.codec = ((now - then) / steps for now, then in zip(self.marks, before, strict=True))
            row.compute = seconds - row.wait
        self.losses, self.last = [], self._step
        tell(RankEvent(row))

    @property
    def _step(self) -> int:
        return self.meter.worker.step - 1 if self.meter else 0

    def _clock(self) -> float:
        return perf_counter() - self.began

    def _meters(self) -> tuple[float, float, float]:
        assert self.meter is not None
        return perf_counter(), self.meter.ledger.exposed_seconds, self.meter.ledger.busy_seconds

    def _totals(self) -> Totals:
        """Bytes of this rank since it attached; of DDP, which keeps no ledger, by the ring formula."""
        assert self.meter is not None
        if self.kind != DDP:
            return Totals.of(self.meter.ledger).since(self.before)
        ring, per_host = 2 * (self.size - 1) * self.dense // self.size * self._step, self.plan.per_host
        between = ring // per_host if self.size > per_host else 0
        return Totals(between, ring - between, self.dense * self._step)

    def _sent(self) -> int | None:
        """Bytes over the host's link; None where other ranks share it."""
        return self._totals().between if self.plan.per_host == 1 else None

    def _links(self) -> dict[str, int | None]:
        nic = lab_bytes() - self.nic if in_lab() else None
        wire, inside, handed = self._totals()
        return {"nic_bytes": nic, "wire_bytes": wire, "inside_bytes": inside, "logical_bytes": handed}


def _has_compiled() -> bool:
    """True if the script used torch.compile, whose cache makes later runs faster."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return bool(getattr(dynamo, "counters", {}).get("frames"))
