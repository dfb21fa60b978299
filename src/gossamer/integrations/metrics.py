"""Metrics: totals of a run, rates since the last report, and when to report."""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.core.errors import AttachError
from gossamer.core.events import Drop, Event, Presence
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.liveness.notice import Notice, OwnNotice
from gossamer.integrations.run_events import RunEvents, held_out_line
from gossamer.integrations.run_observer import ObserverSlot
from gossamer.runtime import Worker

OnMetrics = Callable[[int, dict[str, float]], object]
Told = float | Tensor | None  # a value that a training loop logs

LOST = "is lost; the others go on, and it may come back"
LEFT = "has left, and the others have taken on what it owed; they go on, and it may come back"


class Progress(NamedTuple):
    """Counters of a run at one moment."""

    step: int
    dense: float  # what a dense ring would have sent so far
    sent: int
    received: int
    exposed: float
    clock: float


class Meter:
    """Computes totals since the start, and rates since the last report, and calls `on_metrics`.

    Ratios cover training only: the first mark is set after the handshake and the first copy of the model.
    """

    def __init__(self, worker: Worker, ledger: Ledger, on_metrics: OnMetrics | None, every: int) -> None:
        self.worker, self.ledger, self.on_metrics, self.every = worker, ledger, on_metrics, every
        self.on_late: Callable[[int], None] | None = None  # called with the step of a gradient that came too late
        worker.record.listener = self._hear
        self._known = {*worker.ranks.present.ranks}  # ranks that were there at some time
        self.observer = ObserverSlot.observer
        self.events: RunEvents | None = None  # written to a folder, if the user names one
        self.logged = dict[str, Any]()  # tensors: read from the GPU only when a number is needed
        self.restart()

    def _hear(self, event: Event) -> None:
        self.ledger.hear(event)
        match event:
            case Presence(step, rank, lost, back, left):
                self._settle_dense(self.worker.size - len(back) + len(lost) + len(left))  # those of before
                if self.events is not None:
                    self.events.presence(step, lost, back, left)
                warn_of_changes(step, rank, lost, back, left, self._known)
                self._known |= {*back}
            case Drop(step) if self.on_late is not None:
                self.on_late(step)
            case _:
                pass

    def begin(self, kind: str, events: RunEvents | None = None) -> None:
        """Tell the run observer, if there is one, and the events of this process, that the model is attached."""
        if self.observer is not None:
            self.observer.begin(self, kind)
        if events is not None:
            self.events = events
            events.attached(self.worker)

    def watch(self, notice: Notice | OwnNotice) -> None:
        """Write into the events of this process that it was told to stop, once it is."""
        if self.events is not None:
            self.events.notice = notice

    def saved(self, path: str | os.PathLike[str], seconds: float) -> None:
        """Note a checkpoint for which training stood still for some seconds."""
        if self.events is not None:
            self.events.put("saved", step=self.worker.step - 1, path=os.fspath(path), seconds=round(seconds, 3))

    def end(self) -> None:
        """Write how this process has ended, if it writes events."""
        if self.events is not None:
            self.events.close()

    def log(self, loss: Told, held_out: Told) -> None:
        """Store the values that the training loop logs."""
        for name, value in (("loss", loss), ("held_out", held_out)):
            if value is None:
                continue
            if isinstance(value, Tensor) and value.numel() != 1:
                raise AttachError(f"log({name}=...) takes one number, got a tensor of shape {tuple(value.shape)}")
            self.logged[name] = kept(value)
            if name == "loss":
                self.worker.loss = self.logged[name]  # for controllers, which may go by it
            if self.observer is not None:
                self.observer.told(name, float(self.logged[name]))
        if self.events is not None and held_out is not None:
            self.events.put_later("held out", partial(held_out_line, self.worker.step - 1, self.logged["held_out"]))

    def restart(self) -> None:
        """Count rates and ratios from now on: after start-up, or after a checkpoint has set the step."""
        if self.events is not None:
            self.events.put("loaded", step=self.worker.step - 1)
        self._grown = self.worker.step - 1, 0.0
        self.first = self._last = self.mark()

    def grows(self) -> None:
        """Fix what a dense ring would have sent so far, before parameters are added."""
        self._settle_dense(self.worker.size)

    def _settle_dense(self, size: int) -> None:
        """Fix what a dense ring would have sent so far, among so many ranks since it was fixed last."""
        self._grown = self.worker.step - 1, self._dense(size)

    def _dense(self, size: int) -> float:
        since, settled = self._grown
        return settled + _ring_bytes(self.worker, size) * (self.worker.step - 1 - since)

    def totals(self) -> dict[str, float]:
        """Return bytes, ratio to dense, waiting time, compression error and residual of the run so far."""
        return self._totals(self.mark())

    def step_ended(self) -> None:
        """Report after an optimizer step, if a multiple of `every` was reached since the last report."""
        if self.observer is not None:
            self.observer.stepped()
        if self.events is not None:
            self.events.stepped(self.worker.step - 1)
        if self.on_metrics is None:
            return
        before, now = self._last, self.mark()
        if now.step // self.every == before.step // self.every:
            return
        # Before the call, so that a callback that raises does not get the same report again.
        self._last, metrics = self.report_since(before)
        answer = self.on_metrics(now.step, metrics)
        if isinstance(answer, dict):
            logged: dict[str, Any] = answer  # pyright: ignore[reportUnknownVariableType]
            self.log(logged.get("loss"), logged.get("held_out"))

    def report_since(self, before: Progress) -> tuple[Progress, dict[str, float]]:
        """Return a mark of this moment, and the totals so far with the rates since `before`."""
        now = self.mark()
        return now, self._totals(now) | (self._rates(before, now) if now.step > before.step else {})

    def mark(self) -> Progress:
        """Return the counters of this moment."""
        ledger, dense = self.ledger, self._dense(self.worker.size)
        return Progress(
            self.worker.step - 1, dense, ledger.sent, ledger.received, ledger.exposed_seconds, perf_counter()
        )

    def _totals(self, now: Progress) -> dict[str, float]:
        worker = self.worker
        out = {
            "step": float(now.step),
            "sent_bytes": float(now.sent),
            "received_bytes": float(now.received),
            **self._ratio("ratio_to_dense", self.first, now),
            "exposed_seconds": now.exposed,
            "residual_norm": worker.residual_norm(),
            "lost_residual": worker.record.lost_residual,
            "dropped_steps": float(len(worker.record.dropped_steps)),
            **(
                {"accepted_share": worker.record.accepted[worker.ranks.number] / worker.record.closed_steps}
                if worker.record.closed_steps
                else {}
            ),
            **_ages(worker.record.ages),
            "skipped_steps": float(worker.record.skipped),
            "dropped_rounds": float(worker.record.dropped_rounds),
        }
        out |= {name: float(value) for name, value in self.logged.items()}
        if self.events is not None:
            out |= self.events.metrics()
        if worker.measurement.errors:
            out["relative_error"] = sum(worker.measurement.errors.values()) / len(worker.measurement.errors)
        return out

    def _rates(self, before: Progress, now: Progress) -> dict[str, float]:
        steps = now.step - before.step
        return {
            "step_seconds": (now.clock - before.clock) / steps,
            "sent_bytes_per_step": (now.sent - before.sent) / steps,
            "received_bytes_per_step": (now.received - before.received) / steps,
            "exposed_seconds_per_step": (now.exposed - before.exposed) / steps,
            **self._ratio("recent_ratio_to_dense", before, now),
        }

    def _ratio(self, name: str, before: Progress, now: Progress) -> dict[str, float]:
        """Return the bytes of a dense ring over the bytes sent; nothing if only the ring would have sent."""
        dense, sent = now.dense - before.dense, now.sent - before.sent
        if not sent:
            return {} if dense else {name: 1.0}
        return {name: dense / sent}


def kept(value: float | Tensor) -> float | Tensor:
    """A number to read later: a copy of a tensor, for the loop may overwrite its own, as each replay of a CUDA graph does."""
    return value.detach().clone() if isinstance(value, Tensor) else float(value)


def check_callback(on_metrics: object, every: int) -> None:
    """Check the arguments for metrics now, not at the first report."""
    if on_metrics is not None and not callable(on_metrics):
        raise AttachError(
            f"on_metrics must be a function of (step, metrics), got a {type(on_metrics).__name__}; "
            "pass a function such as on_metrics=lambda step, metrics: print(step, metrics)"
        )
    if every < 1:
        raise AttachError(f"metrics_every must be at least 1, got {every}; to disable reports leave on_metrics out")


def _ages(ages: Counter[int]) -> dict[str, float]:
    """Return the mean and the maximum age in steps of received models."""
    if not ages:
        return {}
    return {"staleness": sum(age * n for age, n in ages.items()) / ages.total(), "most_stale": float(max(ages))}


def _ring_bytes(worker: Worker, size: int) -> float:
    """Return the bytes that each of so many ranks sends in a ring all-reduce of all gradients, uncompressed."""
    dense = sum(bucket.layout.numel * bucket.layout.dtype.itemsize for bucket in worker.buckets)
    return 2 * (size - 1) * dense / size


def warn_of_changes(
    step: int, rank: int, lost: Sequence[int], back: Sequence[int], left: Sequence[int], known: Collection[int]
) -> None:
    """Warn the user of ranks that were lost, have left, are back, or have come for the first time (not `known`)."""
    for ranks, what in ((lost, LOST), (left, LEFT), (back, "is back")):
        for other in ranks:
            said = what if other in known else "has come"
            warnings.warn(f"rank {rank}, step {step}: rank {other} {said}", RuntimeWarning, stacklevel=2)
