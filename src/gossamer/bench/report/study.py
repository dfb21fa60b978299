"""What a record says, computed once: the page, the Markdown table and the figures all show these numbers."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median

from gossamer.bench.record import Record, Run, named
from gossamer.bench.report.formatting import number, spoilt, staleness, times
from gossamer.bench.report.time_to_target import Arrival, arrival, bounds, doubt, last_that_all_reached, ratio, tied
from gossamer.core.errors import CostError
from gossamer.costs import quantities, severity

FEW = 1_000_000  # bytes; below, what processes say to find each other outweighs the training
TOLERANCE = 0.05  # a ledger further than this from the interface's counter is flagged


@dataclass(frozen=True)
class RunRow:
    """One run, in numbers. None where the run does not say."""

    run: Run
    index: int  # in the record: colours follow it
    baseline: bool
    step: float | None  # seconds, the mean: with local steps, most are quick and a few pay for all
    compute: float | None  # the three parts, means too; None where the run did not measure them
    codec: float | None
    wait: float | None
    final: float | None  # the last held-out quality
    reached: float | None  # seconds to the quality that counts, the baseline's last; over several seeds, the mean
    reached_steps: float | None  # optimizer steps up to then
    reached_sent: float | None  # bytes up to then
    time_ratio: float | None  # of the baseline's time to the same quality
    time_bounds: tuple[float, float] | None  # of that ratio, where there are several seeds
    reached_bounds: tuple[float, float] | None  # of the mean time, where there are several seeds
    tied: bool  # with the first, or the first itself and somebody tied with it
    some_missed: bool  # on some seeds it got there, on others it did not
    common: float | None  # seconds to the last quality that all reached
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
    def stale(self) -> str:
        """How old models were when they landed; nothing where they land by schedule."""
        return staleness(self.run.staleness)

    @property
    def outcome(self) -> str:
        """In place of the time that it did not take."""
        if self.cut or self.run.alone:
            return self.run.status if self.cut else "no network"
        return "not on every seed" if self.some_missed else "not reached"


@dataclass(frozen=True)
class Study:
    """A record and its rows, the fastest to the quality that counts first."""

    record: Record
    rows: list[RunRow]
    target: float | None  # the quality that counts, on the first seed
    common: float | None  # the last one that all reached, if some did not reach the target

    @property
    def base(self) -> RunRow | None:
        return next((r for r in self.rows if r.baseline), None)

    @property
    def severity(self) -> float | None:
        """Seconds to send the model once over a host's link, the slowest, over those of a step's computing.

        None where nobody said how long it computed, and of several records, whose networks differ.
        """
        alone = [r.step for r in self.rows if r.run.alone and r.step]
        computed = alone or [r.compute for r in self.rows if r.compute and not r.cut]
        if not computed or not self.record.parameters or self.record.together > 1:
            return None
        try:
            slowest = min(quantities.rate(way) for way in re.split("[,/]", re.sub(r"\d+:", "", self.record.rate)))
        except CostError:  # somebody's own words for a network
            return None
        return severity(self.record.parameters, slowest, median(computed))

    @property
    def others(self) -> list[RunRow]:
        """What competes with the baseline."""
        return [r for r in self.rows if not r.baseline and not r.run.alone]

    @property
    def first(self) -> list[RunRow]:
        """The fastest, and whoever cannot be told from it."""
        there = [r for r in self.rows if r.reached is not None]
        return there[:1] + [r for r in there[1:] if r.tied]


def study_of(record: Record) -> Study:
    """All numbers of a report.

    >>> study_of(Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)).rows
    []
    """
    seeds = list(record.trials.values())
    targets, commons = [_counts(record, runs) for runs in seeds], [last_that_all_reached(record, r) for r in seeds]
    names = [r.name for r in record.runs]
    found = {n: _arrivals(record, n, list(zip(seeds, targets, strict=True))) for n in names}
    meets = {n: _arrivals(record, n, list(zip(seeds, commons, strict=True))) for n in names}
    rows = [_row(record, i, run, found, meets[run.name]) for i, run in enumerate(record.runs)]
    rows.sort(key=_by_step if record.timing else _order)
    missed = any(r.reached is None for r in rows if not r.run.alone)
    return Study(record, _with_ties(record, rows, found), targets[0], commons[0] if missed else None)


Times = dict[str, list[Arrival | None]]  # by name, of each seed


def _counts(record: Record, runs: list[Run]) -> float | None:
    """The baseline's last quality; if it did not come to its end, the last one that all reached."""
    base, target = named(runs, record.baseline), record.target(runs)
    if base is None or base.status == "ok" or target is None or len(runs) < 2:
        return target
    common = last_that_all_reached(record, [r for r in runs if r.evaluations])
    return target if common is None else common


def _arrivals(record: Record, name: str, seeds: list[tuple[list[Run], float | None]]) -> list[Arrival | None]:
    """A model that trains alone may get there, too; no network held it up, so that says nothing."""
    out = list[Arrival | None]()
    for runs, target in seeds:
        run = named(runs, name)
        competes = run is not None and (not run.alone or name == record.baseline)
        out.append(arrival(run, target, record.lower_is_better) if run and competes and target is not None else None)
    return out


def _all(arrivals: list[Arrival | None]) -> list[Arrival]:
    """Of every seed, or none: a mean over those that got there would flatter."""
    there = [a for a in arrivals if a is not None]
    return there if len(there) == len(arrivals) else []


def _with_ties(record: Record, rows: list[RunRow], found: Times) -> list[RunRow]:
    there = [r for r in rows if r.reached is not None]
    if not there:
        return rows

    def doubts(row: RunRow) -> float:
        return doubt(row.run, _all(found[row.run.name])[0], record.lower_is_better)

    first = there[0]
    mine = _all(found[first.run.name])
    names = {r.run.name for r in there[1:] if tied(_all(found[r.run.name]), mine, (doubts(r), doubts(first)))}
    return [replace(r, tied=r.run.name in names or (bool(names) and r is first)) for r in rows]


def compared(row: RunRow) -> str:
    """Its time in those of the baseline, with what seeds leave open, and whether others are as good.

    >>> row = study_of(Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0, runs=[Run("ddp", "ddp")])).rows[0]
    >>> compared(replace(row, time_ratio=0.25)), compared(replace(row, time_ratio=0.25, time_bounds=(0.2, 0.31), tied=True))
    ('0.25×', '0.25× [0.20, 0.31], tied')
    """
    bounds = f" [{', '.join(number(b, 2) for b in row.time_bounds)}]" if row.time_bounds else ""
    return times(row.time_ratio) + bounds + ", tied" * row.tied


def pace(run: Run) -> float | None:
    """Seconds per step; the first one also pays for warming up, so it is left out where there are others."""
    if len(run.steps) < 2:
        return run.steps[0].seconds if run.steps else None
    first, last = run.steps[0], run.steps[-1]
    return (last.seconds - first.seconds) / max(last.step - first.step, 1)


def _row(record: Record, index: int, run: Run, arrivals: Times, meets: list[Arrival | None]) -> RunRow:
    steps = run.steps[1:] or run.steps
    base = record.run(record.baseline)
    mine = _all(arrivals[run.name])
    found = ratio(mine, _all(arrivals[base.name])) if base else None
    sent = [a.sent for a in mine if a.sent is not None]
    return RunRow(
        run=run,
        index=index,
        baseline=run is base,
        step=pace(run),
        compute=_mean(s.compute for s in steps),
        codec=_mean(s.codec for s in steps),
        wait=_mean(s.wait for s in steps),
        final=_last(record, run.name),
        reached=_mean(a.seconds for a in mine),
        reached_steps=_mean(a.step for a in mine),
        reached_sent=fmean(sent) if mine and len(sent) == len(mine) else None,
        time_ratio=found.mean if found else None,
        time_bounds=(found.low, found.high) if found and len(mine) > 1 else None,
        reached_bounds=bounds([a.seconds for a in mine]),
        tied=False,
        some_missed=0 < arrivals[run.name].count(None) < len(arrivals[run.name]),
        common=_mean(a.seconds for a in _all(meets)),
        step_ratio=_ratio(pace(run), pace(base) if base else None),
        wire_step=_per_step(run),
        wire_ratio=_ratio(_per_step(run), _per_step(base) if base else None),
        nic_ratio=_ratio(run.nic_bytes, run.wire_bytes),
    )


def _last(record: Record, name: str) -> float | None:
    """Over the seeds, the mean; none if one of them ended with no number."""
    runs = [named(runs, name) for runs in record.trials.values()]
    lasts = [r.evaluations[-1].quality for r in runs if r and r.evaluations]
    mean = fmean(lasts) if lasts else math.nan
    return mean if math.isfinite(mean) else None


def _order(row: RunRow) -> tuple[bool, float, bool, int]:
    """By the ratio that is shown: over several seeds mean times may stand in another order."""
    shown = row.reached if row.time_ratio is None else row.time_ratio
    return row.reached is None, shown or 0.0, row.cut, row.index


def _by_step(row: RunRow) -> tuple[bool, float, int]:
    return row.cut, row.step or 0.0, row.index


def _per_step(run: Run) -> float | None:
    return run.sent / run.done if run.sent is not None and run.done else None


def _mean(values: Iterable[float | None]) -> float | None:
    kept = [v for v in values if v is not None]
    return fmean(kept) if kept else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
