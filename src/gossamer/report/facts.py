"""What a record says, computed once: the page, the Markdown table and the figures all show these numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gossamer.record import Record, Run

YARDSTICK = "compute"  # trains without a network: a floor for the step time, not a way to train
FEW = 1_000_000  # bytes; below, what processes say to find each other outweighs the training
TOLERANCE = 0.05  # a ledger further than this from the interface's counter is flagged


@dataclass(frozen=True)
class Row:
    """One run, in numbers. None where the run does not say."""

    run: Run
    index: int  # in the record: colours follow it
    baseline: bool
    step: float | None  # seconds, median
    compute: float | None  # the three parts are None where the run did not measure them apart
    codec: float | None
    wait: float | None
    final: float | None  # the last held-out quality
    reached: float | None  # seconds to the baseline's final quality
    reached_sent: int | None  # bytes up to then
    time_ratio: float | None  # of the baseline's time to the same quality
    step_ratio: float | None  # of the baseline's median step
    wire_ratio: float | None  # of the baseline's bytes per step
    nic_ratio: float | None  # interface counter over ledger

    @property
    def nic_off(self) -> bool:
        measurable = (self.run.nic_bytes or 0) >= FEW
        return measurable and self.nic_ratio is not None and abs(self.nic_ratio - 1) > TOLERANCE

    @property
    def failed(self) -> bool:
        return self.run.status != "ok"


@dataclass(frozen=True)
class Facts:
    """A record and its rows, the fastest to the baseline's quality first."""

    record: Record
    rows: list[Row]
    target: float | None

    @property
    def base(self) -> Row | None:
        return next((r for r in self.rows if r.baseline), None)

    @property
    def others(self) -> list[Row]:
        """What competes with the baseline."""
        return [r for r in self.rows if not r.baseline and r.run.recipe != YARDSTICK]


def study(record: Record) -> Facts:
    """All numbers of a report.

    >>> study(Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)).rows
    []
    """
    target = _finite(record.target())
    base = record.run(record.baseline)
    rows = [_row(record, i, run, base, target) for i, run in enumerate(record.runs)]
    return Facts(record, sorted(rows, key=_order), target)


def durations(run: Run) -> list[float]:
    """Seconds of each step; the first one also pays for warming up, so it is left out where there are others."""
    clock = [s.seconds for s in run.steps]
    if len(clock) == 1:
        return clock
    return [b - a for a, b in pairwise(clock)]


def _row(record: Record, index: int, run: Run, base: Run | None, target: float | None) -> Row:
    # A run that neither waits nor codes in any step did not measure it: DDP keeps that to itself.
    apart = (run.steps[1:] or run.steps) if any(s.wait or s.codec for s in run.steps) else []
    reached = None if target is None else run.time_to(target, record.lower_is_better)
    arrival = next((e for e in run.evaluations if e.seconds == reached), None)
    base_time = base.time_to(target, record.lower_is_better) if base and target is not None else None
    return Row(
        run=run,
        index=index,
        baseline=run is base,
        step=_median(durations(run)),
        compute=_median(s.compute for s in apart),
        codec=_median(s.codec for s in apart),
        wait=_median(s.wait for s in apart),
        final=_finite(run.evaluations[-1].quality) if run.evaluations else None,
        reached=reached,
        reached_sent=arrival.sent if arrival else None,
        time_ratio=_ratio(reached, base_time),
        step_ratio=_ratio(_median(durations(run)), _median(durations(base)) if base else None),
        wire_ratio=_ratio(_per_step(run), _per_step(base) if base else None),
        nic_ratio=_ratio(run.nic_bytes, run.wire_bytes),
    )


def _order(row: Row) -> tuple[bool, float, bool, int]:
    return row.reached is None, row.reached or 0.0, row.failed, row.index


def _per_step(run: Run) -> float | None:
    return run.wire_bytes / len(run.steps) if run.steps else None


def _median(values: Iterable[float]) -> float | None:
    kept = [v for v in values if math.isfinite(v)]
    return median(kept) if kept else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
