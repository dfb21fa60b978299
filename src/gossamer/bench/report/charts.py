"""The charts as data. The page draws them with its script, `figures` draws them for papers: the same points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, TypeVar

from gossamer.bench.record import Run
from gossamer.bench.report.formatting import capital, number, quality
from gossamer.bench.report.study import RunRow, Study
from gossamer.core.text import listed

T = TypeVar("T")
POINTS = 4_000  # in one chart: more cannot be seen, and the page has to stay small
LOG_FROM = 50  # positive values that span more than this factor start on a logarithmic axis
APART = 20  # so do lines whose ends are further apart than this factor: the short ones would be a smear

Kind = Literal["seconds", "bytes", "count", "number", "rate"]
Point = tuple[float, float | None, int, float | None]  # x, y, optimizer step, y averaged over its neighbours


@dataclass(frozen=True)
class Axis:
    label: str
    kind: Kind
    log: bool = False


TIME = Axis("training time", "seconds")


@dataclass(frozen=True)
class Series:
    run: int  # its place in the record
    points: list[Point]


@dataclass(frozen=True)
class Target:
    value: float
    label: str
    below: bool  # where its label disturbs least: lines come from the other side


@dataclass(frozen=True)
class LineChart:
    """y over x, one line per run."""

    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: list[Series] = field(default_factory=list[Series])
    marks: bool = False  # few points, each of them worth a mark
    target: Target | None = None
    focus: float | None = None  # worse values of y are out of sight until one zooms out: it is not decided there
    kind: Literal["lines"] = "lines"


@dataclass(frozen=True)
class Bar:
    run: int
    parts: list[float]  # seconds; empty where they were not measured apart
    total: float
    by_difference: bool = False  # it does not say how long it waits: what it takes beyond computing alone


@dataclass(frozen=True)
class BarChart:
    """Where a step's time goes, one bar per run."""

    id: str
    title: str
    caption: str
    parts: list[str]
    rows: list[Bar]
    kind: Literal["bars"] = "bars"


Chart = LineChart | BarChart
Line = tuple[int, list[tuple[float, float, int]]]  # a run's place in the record, and its x, y and step


def charts(study: Study) -> list[Chart]:
    """All charts that this record has something to say in.

    >>> from gossamer.bench.report.study import study_of
    >>> from gossamer.bench.record import Record
    >>> charts(study_of(Record("", "", "lm", "", "loss", True, 1, 4, "200mbit", 0)))
    []
    """
    drawn: list[Chart] = [_step_time(study), _residuals(study)]
    if not study.record.compute:  # of an emulation, no loss means anything
        drawn[:0] = [_quality_time(study), _quality_bytes(study), _loss_time(study)]
    return [c for c in drawn if (c.series if isinstance(c, LineChart) else c.rows)]


def _quality_time(study: Study) -> LineChart:
    lines = [(i, [(e.seconds, e.quality, e.step) for e in r.evaluations]) for i, r in _runs(study)]
    caption = f"{'Lower' if study.record.lower_is_better else 'Higher'} and further left is better."
    if study.target is not None:
        caption += " The first steps lie beyond the edge; a logarithmic axis shows them."
    title = f"{capital(quality(study.record.metric))} over time"
    return _judged(LineChart("quality-time", title, caption, TIME, Axis(study.record.metric, "number")), lines, study)


def _quality_bytes(study: Study) -> LineChart:
    lines = [
        (i, [(float(e.sent), e.quality, e.step) for e in r.evaluations if e.sent is not None])
        for i, r in _runs(study)
        if not r.alone
    ]
    title = f"{capital(quality(study.record.metric))} over bytes sent"
    caption = "What each host had put on its link by then, by the ledger."
    x, y = Axis("sent per host", "bytes"), Axis(study.record.metric, "number")
    return _judged(LineChart("quality-bytes", title, caption, x, y), lines, study)


def _loss_time(study: Study) -> LineChart:
    lines = [(i, [(s.seconds, s.loss, s.step) for s in r.steps]) for i, r in _runs(study)]
    window = max((_window(len(points)) for _, points in lines), default=1)
    longest = max((len(points) for _, points in lines), default=0)
    every = "every step" if longest <= _limit(len(lines)) else f"up to {_limit(len(lines))} of its steps"
    means = f" Thin: {every}. Bold: the mean over up to {window} steps." if window > 1 else ""
    whose = "The mean over the ranks that told theirs." if study.record.script else "On the data of rank 0."
    y = Axis("training loss", "number")
    chart = LineChart("loss-time", "Training loss over time", f"{whose}{means}", TIME, y)
    return _drawn(chart, [(i, _smooth(points)) for i, points in lines])


def _residuals(study: Study) -> LineChart:
    # A recipe without memory owes nothing, at any step: nothing to draw.
    owing = [(i, r) for i, r in _runs(study) if any(v for _, v in r.residuals)]
    lines = [(i, [(float(s), v, s) for s, v in r.residuals]) for i, r in owing]
    caption = (
        "What error feedback still owes the model. It should level off; endless growth means too little gets through."
    )
    x, y = Axis("step", "count"), Axis("residual norm", "number")
    return _drawn(LineChart("residuals", "Residual norm", caption, x, y), [(i, _plain(points)) for i, points in lines])


def _step_time(study: Study) -> BarChart:
    several = study.record.together > 1  # each of them computes for its own time, and names end with which it is
    of = {r.index: r.run.name.rpartition(" (")[2] if several else "" for r in study.rows}
    alone = {of[r.index]: r.step for r in study.rows if r.run.alone}
    timed = sorted((r for r in study.rows if r.step is not None), key=lambda r: r.step or 0.0)
    rows = [_bar(r, r.step or 0.0, alone.get(of[r.index])) for r in timed]
    caption = (
        "Means over the steps. Compute: forward, backward, optimizer. Codec: encoding and decoding, beside the rest where "
        "it can, so a bar may pass the tick that marks the whole step by the clock. Exposed wait: training stood still for "
        "the network."
    )
    if any(row.by_difference for row in rows):
        names = listed([study.record.runs[row.run].name for row in rows if row.by_difference])
        caption += f" {names} cannot say: its wait is its step without that of compute."
    if any(not row.parts for row in rows):
        caption += " Hatched: not measured apart; beside compute it would be known how long it waits."
    return BarChart("step-time", "Where a step’s time goes", caption, ["compute", "codec", "exposed wait"], rows)


def _bar(row: RunRow, step: float, alone: float | None) -> Bar:
    """A yardstick does not say how long it waits; beside a run that computes alone that is known all the same."""
    if row.compute is not None:
        return Bar(row.index, [row.compute, row.codec or 0.0, row.wait or 0.0], step)
    if alone is None or alone > step:
        return Bar(row.index, [], step)
    return Bar(row.index, [alone, 0.0, step - alone], step, by_difference=True)


def _judged(chart: LineChart, lines: list[Line], study: Study) -> LineChart:
    """A chart of quality has marks, and the quality that counts to aim at."""
    drawn = _drawn(replace(chart, marks=True), [(i, _plain(points)) for i, points in lines])
    if study.target is None:
        return drawn
    is_cut = study.base is not None and study.base.cut and len(study.rows) > 1
    whose = "last that all reached," if is_cut else f"{study.record.baseline}’s final"
    label = f"{whose} {number(study.target)}"
    target = Target(study.target, label, study.record.lower_is_better)
    return replace(drawn, target=target, focus=None if drawn.y.log else _focus(study, drawn.series))


def _drawn(chart: LineChart, lines: list[tuple[int, list[Point]]]) -> LineChart:
    """With those lines that have points, and axes that suit them."""
    lines = [(i, points) for i, points in lines if points]
    series = [Series(i, spaced(points, _limit(len(lines)))) for i, points in lines]
    ends = [s.points[-1][0] for s in series]
    ys = [p[1] for s in series for p in s.points if p[1] is not None]
    x, y = replace(chart.x, log=_wide(ends, APART)), replace(chart.y, log=_wide(ys, LOG_FROM))
    return replace(chart, x=x, y=y, series=series)


def _focus(study: Study, series: list[Series]) -> float | None:
    """The worst quality that anybody had after a fifth of its steps: all start at the same, and nothing is decided there."""
    later = list[float]()
    for s in series:
        last = s.points[-1][2]
        later += [p[1] for p in s.points if p[1] is not None and p[2] and p[2] >= last / 5][:1]
    if not later:
        return None
    return max(later) if study.record.lower_is_better else min(later)


def _limit(lines: int) -> int:
    return max(50, POINTS // max(1, lines))


def _window(count: int) -> int:
    """About a tenth of all steps, and odd."""
    return 2 * (count // 20) + 1


def _plain(points: list[tuple[float, float, int]]) -> list[Point]:
    """JSON knows no infinity: a value that is not finite is a gap."""
    return [(x, y if math.isfinite(y) else None, step, None) for x, y, step in points]


def _smooth(points: list[tuple[float, float, int]]) -> list[Point]:
    """Each point with the mean over its neighbours."""
    plain, half = _plain(points), _window(len(points)) // 2
    if not half:
        return plain
    sums = list(accumulate((y or 0.0 for _, y, _, _ in plain), initial=0.0))
    counts = list(accumulate((y is not None for _, y, _, _ in plain), initial=0))
    out: list[Point] = []
    for i, (x, y, step, _) in enumerate(plain):
        low, high = max(0, i - half), min(len(plain), i + half + 1)
        mean = None if y is None else float(f"{(sums[high] - sums[low]) / (counts[high] - counts[low]):.6g}")
        out.append((x, y, step, mean))
    return out


def spaced(rows: Sequence[T], most: int) -> list[T]:
    """At most so many rows, evenly spaced, the first and the last among them.

    >>> spaced(range(9), 3)
    [0, 4, 8]
    """
    if len(rows) <= most:
        return [*rows]
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _wide(values: list[float], factor: float) -> bool:
    return bool(values) and min(values) > 0 and max(values) > factor * min(values)


def _runs(study: Study) -> list[tuple[int, Run]]:
    return list(enumerate(study.record.runs))
