"""Charts as SVG for print: light, fixed size, nothing that moves."""

import math
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from gossamer.bench.report.charts import Axis, Bar, BarChart, LineChart, Series
from gossamer.bench.report.formatting import seconds
from gossamer.bench.report.palette import PARTS, Style
from gossamer.core import files

AUTHOR = "<!-- drawn by gossamer -->"
SVG = files.FileKind("figure", (AUTHOR.encode(),))
WIDTH, HEIGHT = 480, 300
LONG = 30  # letters of a name beside a bar
INK, SOFT, HAIR = "#1c1e21", "#5b616a", "#e4e6e9"
UNSPLIT = f'none" stroke="{SOFT}" stroke-dasharray="2 2'  # an empty bar: its parts are not known
UNITS = {
    "seconds": [(1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")],
    "bytes": [(1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")],
    "number": [(1.0, "")],
    "count": [(1.0, "")],
}


XY = tuple[float, float]


class Scale(NamedTuple):
    """Values of an axis to places on paper."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, v = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (v - low) / ((high - low) or 1.0) * (self.end - self.start)


def lines(chart: LineChart, names: list[str], styles: list[Style]) -> str:
    """One chart of lines, with its names below."""
    keep = _keep(chart)
    series = [Series(s.run, [p for p in s.points if keep(p[0], p[1])]) for s in chart.series]
    series = [s for s in series if s.points]
    left, right, top, bottom = 52.0, WIDTH - 12.0, 24.0, HEIGHT - 40.0
    x, y = _scales(chart, series, (left, right), (bottom, top))
    out = _frame(chart, x, y)
    room = f'x="{left}" y="{top - 5}" width="{right - left + 5}" height="{bottom - top + 5}"'
    out.append(f'<clipPath id="inside"><rect {room}/></clipPath>')
    out.append(
        f'<g clip-path="url(#inside)">{"".join(_series(s, styles[s.run], x, y, chart.marks) for s in series)}</g>'
    )
    longest = max(map(len, names), default=0)
    columns = 4 if longest < 15 else 2 if longest < 36 else 1
    for k, s in enumerate(series):
        at = (left + (k % columns) * (right - left) / columns, HEIGHT + 14 + 18 * (k // columns))
        out.append(_key(at, names[s.run], styles[s.run]))
    return _document(chart.title, HEIGHT + 6 + 18 * math.ceil(len(series) / columns), out)


def _frame(chart: LineChart, x: Scale, y: Scale) -> list[str]:
    """Axes, their labels, and the line to reach."""
    left, right, bottom = x.start, x.end, y.start
    out = [_text(4, 13, _named(chart.y)), _text(right, HEIGHT - 6, _named(chart.x), "end")]
    for v, text in ticks(y, chart.y, 7):
        out += [_line((left, y.at(v)), (right, y.at(v)), HAIR), _text(left - 7, y.at(v) + 4, text, "end")]
    for v, text in ticks(x, chart.x):
        out += [_line((x.at(v), bottom), (x.at(v), bottom + 4), SOFT), _text(x.at(v), bottom + 17, text, "middle")]
    out.append(_line((left, bottom), (right, bottom), SOFT))
    if chart.target and y.low <= chart.target.value <= y.high:
        at = y.at(chart.target.value)
        out.append(_line((left, at), (right, at), SOFT, "2 3"))
        out.append(_text(right, at + (12 if chart.target.below else -5), chart.target.label, "end"))
    return out


def _named(axis: Axis) -> str:
    return axis.label + (", logarithmic" if axis.log else "")


def bars(chart: BarChart, names: list[str]) -> str:
    """Stacked bars, one per run."""
    pitch, top = 24, 34
    names = [name if len(name) <= LONG else name[: LONG - 1] + "…" for name in names]
    left = 14 + 6.6 * max(len(names[r.run]) for r in chart.rows)
    bottom = top + pitch * len(chart.rows)
    most = max(max(r.total, sum(r.parts)) for r in chart.rows) or 1.0
    x = Scale(0.0, most, left, WIDTH - 58.0)
    out: list[str] = []
    for v, text in ticks(x, Axis("", "seconds", False)):
        out += [_line((x.at(v), top), (x.at(v), bottom), HAIR), _text(x.at(v), bottom + 15, text, "middle")]
    fills = [PARTS[k].light for k in range(len(chart.parts))]
    keys = list(zip(chart.parts, fills, strict=True))
    if any(not row.parts for row in chart.rows):
        keys.append(("not measured", UNSPLIT))
    for k, (part, fill) in enumerate(keys):
        out += [_rect(left + 95 * k, 8, 10, 10, fill), _text(left + 95 * k + 15, 17, part)]
    for i, row in enumerate(chart.rows):
        out += _bar(row, names[row.run], x, top + pitch * i + 5)
    return _document(chart.title, bottom + 24, out)


def _bar(row: Bar, name: str, x: Scale, y: float) -> list[str]:
    out, done = [_text(x.start - 8, y + 11, name, "end", INK)], 0.0
    for k, part in enumerate(row.parts):
        out.append(_rect(x.at(done), y, x.at(part) - x.start, 14, PARTS[k].light))
        done += part
    if not row.parts:
        out.append(_rect(x.start, y, x.at(row.total) - x.start, 14, UNSPLIT))
    out.append(_line((x.at(row.total), y - 3), (x.at(row.total), y + 17), INK, width=1.8))
    return [*out, _text(x.at(max(done, row.total)) + 7, y + 11, seconds(row.total), "start", INK)]


def ticks(scale: Scale, axis: Axis, count: int = 6) -> list[tuple[float, str]]:
    """Round values and their labels.

    >>> [text for _, text in ticks(Scale(0, 180, 0, 1), Axis("", "seconds", False))]
    ['0', '50 s', '100 s', '150 s']
    >>> [text for _, text in ticks(Scale(2e6, 9e8, 0, 1, True), Axis("", "bytes", True))]
    ['10 MB', '100 MB']
    """
    decades = math.log10(scale.high / scale.low) if scale.log else 0.0
    if decades > 0.7:
        few = [1] if decades > 2 else [1, 3] if decades > 1.3 else [1, 2, 5]
        every = max(1, math.ceil(decades / count))
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        values = [m * 10.0**p for p in powers if p % every == 0 for m in few]
        return [(v, _label(v, _unit(axis, v))) for v in values if scale.low * 0.9999 <= v <= scale.high * 1.0001]
    unit = _unit(axis, max(abs(scale.low), abs(scale.high)))
    span = (scale.high - scale.low) / unit[0] or 1.0
    whole = axis.kind == "count"
    least = max(span / count, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(
        m * power for m in ((1, 2, 5, 10, 20) if whole else (1, 2, 2.5, 5, 10, 20)) if least <= m * power * 1.0001
    )
    first, last = math.ceil(scale.low / unit[0] / step - 1e-9), math.floor(scale.high / unit[0] / step + 1e-9)
    return [(i * step * unit[0], _label(i * step * unit[0], unit)) for i in range(first, last + 1)]


def _unit(axis: Axis, value: float) -> tuple[float, str]:
    """The largest unit that leaves a handful of whole ones."""
    fits = [u for u in UNITS[axis.kind] if value >= u[0] * (10 if u[1] in ("min", "h") else 0.999)]
    return fits[-1] if fits else UNITS[axis.kind][0]


def _label(value: float, unit: tuple[float, str]) -> str:
    if value == 0:
        return "0"
    return f"{value / unit[0]:.6g} {unit[1]}".strip().replace("-", "\N{MINUS SIGN}")


def _keep(chart: LineChart) -> Callable[[float, float | None], bool]:
    return lambda x, y: y is not None and (not chart.x.log or x > 0) and (not chart.y.log or y > 0)


def _scales(
    chart: LineChart, series: list[Series], across: tuple[float, float], up: tuple[float, float]
) -> tuple[Scale, Scale]:
    xs = [p[0] for s in series for p in s.points] or [1.0]
    ys = [v for s in series for p in s.points if (v := p[1] if p[3] is None else p[3]) is not None] or [1.0]
    if chart.target and chart.focus is not None:
        ys = [v for v in ys if (v <= chart.focus if chart.target.below else v >= chart.focus)] or ys
    if chart.target:
        ys.append(chart.target.value)
    # More room on the side where the target has its label.
    below, above = (2, 1) if chart.target and chart.target.below else (1, 2) if chart.target else (1, 1)
    room = (max(ys) - min(ys) or abs(max(ys)) or 1.0) * 0.05
    low, high = min(ys) - below * room, max(ys) + above * room
    if min(ys) >= 0:
        low = max(0.0, low)
    y = (min(ys) / 1.08**below, max(ys) * 1.08**above) if chart.y.log else (low, high)
    x = (min(xs) if chart.x.log else min(0.0, *xs), max(xs))
    return Scale(*x, *across, chart.x.log), Scale(*y, *up, chart.y.log)


def _series(series: Series, style: Style, x: Scale, y: Scale, marks: bool) -> str:
    """Thin line of every value and bold line of the means, where there are means; else one line, with marks."""
    smooth = any(p[3] is not None for p in series.points)
    bold = [(x.at(p[0]), y.at(v)) for p in series.points if (v := p[3] if smooth else p[1]) is not None]
    out = _path(bold, style, 1.8, 1.0)
    if smooth:
        out = _path([(x.at(p[0]), y.at(p[1])) for p in series.points if p[1] is not None], style, 0.7, 0.3, False) + out
    if marks and len(bold) <= 40:
        fill = style.colour.light
        out += "".join(
            f'<path d="{style.mark}" fill="{fill}" transform="translate({a:.1f} {b:.1f}) scale(.75)"/>' for a, b in bold
        )
    return out


def _path(points: list[XY], style: Style, width: float, opacity: float, dash: bool = True) -> str:
    d = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
    dashed = ' stroke-dasharray="6 4"' if style.dashed and dash else ""
    return (
        f'<path d="{d}" fill="none" stroke="{style.colour.light}" stroke-width="{width}" opacity="{opacity}"{dashed}/>'
    )


def _key(at: XY, name: str, style: Style) -> str:
    x, y = at
    mark = (
        f'<path d="{style.mark}" fill="{style.colour.light}" transform="translate({x + 10:.1f} {y - 4}) scale(.75)"/>'
    )
    return _path([(x, y - 4), (x + 20, y - 4)], style, 1.8, 1.0) + mark + _text(x + 26, y, name, "start", INK)


def _line(start: XY, end: XY, colour: str, dash: str = "", width: float = 1) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    way = f"M{start[0]:.1f} {start[1]:.1f}L{end[0]:.1f} {end[1]:.1f}"
    return f'<path d="{way}" stroke="{colour}" stroke-width="{width}"{dashed}/>'


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = SOFT) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _document(title: str, height: float, parts: list[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" font-size="11">\n{AUTHOR}\n'
        f'<title>{escape(title)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
