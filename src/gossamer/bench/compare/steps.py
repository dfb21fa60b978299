"""Measure step times: train all runs in slices on one network, and take medians over steps."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from gossamer.bench.compare.baselines import BASELINES, PERIOD
from gossamer.bench.compare.events import OnEvent
from gossamer.bench.compare.launch import launch
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.record import Record, Run, Step
from gossamer.recipe import Recipe

WARM_UP = 2  # slices that compile kernels, check collectives between ranks, and let DDP regroup its buckets


@dataclass(frozen=True)
class StepRow:
    """One run at one rate; bytes are per step and host, times are medians over steps with their range.

    Where only some steps send, medians are over whole rounds: a median over steps would leave out the sending.
    """

    recipe: str
    rate: str
    hosts: int
    step_ms: float
    low_ms: float
    high_ms: float
    ratio_to_ddp: float | None
    ratio_to_compute: float | None
    sent_mb: float | None  # None where a baseline has neither ledger nor formula
    nic_mb: float | None
    loss: float | None
    error: str = ""
    per_host: int = 1
    inside_mb: float | None = None  # sent between ranks of one host, not over its link
    compute: str = ""  # how long an emulated accelerator computed
    exposed_ms: float | None = None  # what a step takes beyond computing alone, so what nothing hid
    processor_ms: float | None = None  # of a rank, all its threads together
    slow: str = ""  # ranks that slept, as RANK:MS
    waited_ms: float | None = None  # of rank 0's training loop, for the network, in a mean step
    coded_ms: float | None = None  # of rank 0, on whichever thread, in a mean step


def measure_steps(plan: ComparePlan, turns: int, rate: str | None, hosts: int, on_event: OnEvent) -> list[StepRow]:
    """Train the plan's runs in turns of `plan.chunk` steps, so many and the first ones, and return the cost of their steps."""
    chunk, slow = plan.chunk, plan.slow
    turns = max(turns, *(ceil(_period(kind) / chunk) for kind in plan.contenders.values()))  # one whole round at least
    plan = replace(plan, steps=(turns + WARM_UP) * chunk, measure_every=0)
    record, code = launch(plan, hosts, rate, "gossamer bench steps", on_event)
    if code > 128:
        raise KeyboardInterrupt(code - 128)
    taken = {run.name: paces(run, chunk) for run in record.runs}
    medians = {name: statistics.median(p) for name, p in taken.items() if p}
    return [_row(run, taken[run.name], medians, record, slow, run.steps[WARM_UP * chunk :]) for run in record.runs]


def paces(run: Run, chunk: int) -> list[float]:
    """Milliseconds per step of each step, or of each round of steps, after the warm-up.

    The first step of a slice waits for all ranks and has a cold cache, so it counts only within rounds, which cannot leave
    a step out. Ranks that compute alone do not wait for each other within a slice: where they share a processor, the first
    one ends long before the last, so their step time is taken from whole slices.
    """
    steps, period = run.steps, _period(run.recipe)
    if run.alone:
        return [1000 * (b.seconds - a.seconds) / chunk for a, b in pairwise(steps[(WARM_UP - 1) * chunk :: chunk])]
    ends = range(WARM_UP * chunk + period - 1, len(steps), period)
    spans = [(steps[i - period], steps[i]) for i in ends if period > 1 or chunk == 1 or i % chunk]
    return [1000 * (b.seconds - a.seconds) / (b.step - a.step) for a, b in spans]  # backup workers skip steps


def _period(kind: str) -> int:
    """Number of steps after which a run repeats its pattern."""
    if kind in BASELINES:
        return PERIOD if kind == "ddp-postlocal" else 1
    schedule = Recipe.of(kind).schedule
    return int(getattr(schedule, "every", schedule.shape.period))


def _row(
    run: Run,
    taken: Sequence[float],
    medians: dict[str, float],
    record: Record,
    slow: Sequence[str],
    settled: Sequence[Step],
) -> StepRow:
    median = medians.get(run.name, 0.0)

    def ratio(name: str) -> float | None:
        return round(median / medians[name], 3) if median and name in medians else None

    share, whole = _of_a_step(run), len(settled) // _period(run.recipe) * _period(run.recipe)
    settled = settled[:whole] or settled  # the steps of a round that was cut off have not waited yet
    return StepRow(
        recipe=run.name,
        rate=record.rate,
        hosts=record.hosts,
        step_ms=round(median, 1),
        low_ms=round(min(taken, default=0.0), 1),
        high_ms=round(max(taken, default=0.0), 1),
        ratio_to_ddp=ratio("ddp"),
        ratio_to_compute=ratio("compute"),
        sent_mb=_megabytes(run.wire_bytes, share),
        nic_mb=_megabytes(run.nic_bytes, share),
        loss=round(run.evaluations[-1].quality, 4) if run.evaluations and not record.compute else None,
        error=run.error,
        per_host=record.per_host,
        inside_mb=_megabytes(run.inside_bytes, share),
        compute=record.compute,
        exposed_ms=round(median - medians["compute"], 1) if median and "compute" in medians else None,
        processor_ms=None if run.processor is None else round(1000 * run.processor, 1),
        slow=" ".join(slow),
        waited_ms=_mean_ms([step.wait for step in settled]),
        coded_ms=_mean_ms([step.codec for step in settled]),
    )


def _mean_ms(seconds: Sequence[float | None]) -> float | None:
    known = [s for s in seconds if s is not None]
    return round(1000 * statistics.fmean(known), 1) if known else None


def _of_a_step(run: Run) -> float:
    """Which part of a run's bytes a step has: that of whole rounds, for the steps of one that was cut off have sent nothing yet."""
    ends = [(0, 0)]
    if run.recipe not in BASELINES and _period(run.recipe) > 1:
        ends_round = Recipe.of(run.recipe).schedule.ends_round
        ends += [(e.step, e.sent) for e in run.evaluations if e.sent and ends_round(e.step)]
    if len(ends) == 1:
        return 1 / max(run.done, 1)
    (begin, before), (end, sent) = ends[1 if len(ends) > 2 else 0], ends[-1]  # late messages are not in the first
    return (sent - before) / (end - begin) / (run.evaluations[-1].sent or 1)


def _megabytes(total: int | None, share: float) -> float | None:
    return None if total is None else round(total * share / 1e6, 4)
