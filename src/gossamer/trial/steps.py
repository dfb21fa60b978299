"""What a step costs: every contender in turns on one network, and the medians of its turns."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gossamer.record import Record, Run
from gossamer.trial.launch import OnEvent, launch
from gossamer.trial.plan import Plan

WARM_UP = 2  # turns that compile kernels, check collectives against one another, and let DDP regroup its buckets


@dataclass(frozen=True)
class StepRow:
    """One contender at one rate; bytes are per step and rank, seconds are medians over turns with their range."""

    recipe: str
    rate: str
    hosts: int
    step_ms: float
    low_ms: float
    high_ms: float
    ratio_to_ddp: float | None
    ratio_to_compute: float | None
    sent_mb: float | None  # None where a yardstick keeps no ledger and has no formula
    nic_mb: float | None
    loss: float | None
    error: str = ""


def measure_steps(
    contenders: dict[str, str],
    rate: str | None,
    hosts: int,
    turns: int,
    chunk: int,
    on_event: OnEvent,
    workload: str = "lm",
) -> list[StepRow]:
    """Train all contenders in turns of `chunk` steps, and say what their steps took."""
    plan = Plan(contenders, workload, steps=(turns + WARM_UP) * chunk, chunk=chunk, measure_every=0)
    record, code = launch(plan, hosts, rate, "gossamer bench steps", on_event)
    if code > 128:
        raise KeyboardInterrupt(code - 128)
    paces = {run.name: _paces(run) for run in record.runs}
    medians = {name: statistics.median(p) for name, p in paces.items() if p}
    return [_row(run, paces[run.name], medians, record) for run in record.runs]


def _paces(run: Run) -> list[float]:
    """Milliseconds per step of each turn after the warm-up."""
    marks = run.evaluations[WARM_UP:]
    return [1000 * (b.seconds - a.seconds) / (b.step - a.step) for a, b in pairwise(marks) if b.step > a.step]


def _row(run: Run, paces: Sequence[float], medians: dict[str, float], record: Record) -> StepRow:
    median = medians.get(run.name, 0.0)

    def ratio(name: str) -> float | None:
        return round(median / medians[name], 3) if median and name in medians else None

    steps = max(len(run.steps), 1)
    return StepRow(
        recipe=run.name,
        rate=record.rate,
        hosts=record.hosts,
        step_ms=round(median, 1),
        low_ms=round(min(paces, default=0.0), 1),
        high_ms=round(max(paces, default=0.0), 1),
        ratio_to_ddp=ratio("ddp"),
        ratio_to_compute=ratio("compute"),
        sent_mb=round(run.wire_bytes / steps / 1e6, 4) if run.wire_bytes or run.recipe == "compute" else None,
        nic_mb=None if run.nic_bytes is None else round(run.nic_bytes / steps / 1e6, 4),
        loss=round(run.evaluations[-1].quality, 4) if run.evaluations else None,
        error=run.error,
    )
