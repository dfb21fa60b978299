"""What a record says, computed once: the page, the Markdown table and the figures all show these numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from gossamer.record import Record, Run
from gossamer.report.words import spoilt

FEW = 1_000_000  # bytes; below, what processes say to find each other outweighs the training
TOLERANCE = 0.05  # a ledger further than this from the interface's counter is flagged


@dataclass(frozen=True)
class Row:
    """One run, in numbers. None where the run does not say."""

    run: Run
    index: int  # in the record: colours follow it
    baseline: bool
    step: float | None  # seconds, the mean: with local steps, most are quick and a few pay for all
    compute: float | None  # the three parts, means too; None where the run did not measure them
    codec: float | None
    wait: float | None
    final: float | None  # the last held-out quality
    reached: float | None  # seconds to the baseline's final quality
    reached_steps: int | None  # optimizer steps up to then
    reached_sent: int | None  # bytes up to then
    time_ratio: float | None  # of the baseline's time to the same quality
    step_ratio: float | None  # of the baseline's step
    wire_step: float | None  # bytes per step over one host's link
    wire_ratio: float | None  # of the baseline's
    nic_ratio: float | None  # interface counter over ledger

    @property
    def nic_off(self) -> bool:
        measurable = (self.run.nic_bytes or 0) >= FEW
        return measurable and self.nic_ratio is not None and abs(self.nic_ratio - 1) > TOLERANCE

    @property
    def cut(self) -> bool:
        """It did not come to its end."""
        return self.run.status != "ok"

    @property
    def spoilt(self) -> str:
        """What values that are not finite have cost, and which ranks they came from; nothing if all went well."""
        return spoilt(self.run.skipped_steps, self.run.dropped_rounds, self.run.spoilt)

    @property
    def outcome(self) -> str:
        """In place of the time that it did not take."""
        return self.run.status if self.cut else "no network" if self.run.alone else "not reached"


@dataclass(frozen=True)
class Study:
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
        return [r for r in self.rows if not r.baseline and not r.run.alone]


def study_of(record: Record) -> Study:
    """All numbers of a report.

    >>> study_of(Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)).rows
    []
    """
    target = record.target()
    base = record.run(record.baseline)
    rows = [_row(record, i, run, base, target) for i, run in enumerate(record.runs)]
    return Study(record, sorted(rows, key=_order), target)


def pace(run: Run) -> float | None:
    """Seconds per step; the first one also pays for warming up, so it is left out where there are others."""
    if len(run.steps) < 2:
        return run.steps[0].seconds if run.steps else None
    first, last = run.steps[0], run.steps[-1]
    return (last.seconds - first.seconds) / max(last.step - first.step, 1)


def _row(record: Record, index: int, run: Run, base: Run | None, target: float | None) -> Row:
    steps = run.steps[1:] or run.steps
    # A model that trains alone may get there, too; no network held it up, so that says nothing.
    competes = not run.alone or run is base
    arrival = run.arrival(target, record.lower_is_better) if competes and target is not None else None
    goal = base.arrival(target, record.lower_is_better) if base and target is not None else None
    return Row(
        run=run,
        index=index,
        baseline=run is base,
        step=pace(run),
        compute=_mean(s.compute for s in steps),
        codec=_mean(s.codec for s in steps),
        wait=_mean(s.wait for s in steps),
        final=_finite(run.evaluations[-1].quality) if run.evaluations else None,
        reached=arrival.seconds if arrival else None,
        reached_steps=arrival.step if arrival else None,
        reached_sent=arrival.sent if arrival else None,
        time_ratio=_ratio(arrival.seconds if arrival else None, goal.seconds if goal else None),
        step_ratio=_ratio(pace(run), pace(base) if base else None),
        wire_step=_per_step(run),
        wire_ratio=_ratio(_per_step(run), _per_step(base) if base else None),
        nic_ratio=_ratio(run.nic_bytes, run.wire_bytes),
    )


def _order(row: Row) -> tuple[bool, float, bool, int]:
    return row.reached is None, row.reached or 0.0, row.cut, row.index


def _per_step(run: Run) -> float | None:
    return run.sent / run.done if run.sent is not None and run.done else None


def _mean(values: Iterable[float | None]) -> float | None:
    kept = [v for v in values if v is not None]
    return fmean(kept) if kept else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
