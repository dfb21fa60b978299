"""All trials of a search as one figure: quality over the learning rate."""

import math
from typing import NamedTuple

from markupsafe import escape

from gossamer.bench.report.formatting import number
from gossamer.bench.report.palette import Style

WIDTH, HEIGHT = 720.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 708.0, 20.0, 272.0
CROWD = 0.9  # of the values, from the best on, have the axis; what is worse stands at its edge


class Point(NamedTuple):
    run: int  # its recipe's place in the record
    lr: float
    quality: float
    best: bool
    title: str


def scatter(points: list[Point], metric: str, styles: list[Style], lower_is_better: bool) -> str:
    """An SVG in the page's own colours; nothing if there is nothing to show."""
    if not points:
        return ""
    rates = sorted({p.lr for p in points})
    low, high = math.log2(rates[0]) - 0.3, math.log2(rates[-1]) + 0.3
    values = sorted((p.quality for p in points), reverse=not lower_is_better)  # from the best on
    least, most = sorted((values[0], values[min(len(values) - 1, int(CROWD * len(values)))]))
    room = (most - least or abs(most) or 1.0) * 0.08
    least, most = least - room, most + room

    def x(lr: float) -> float:
        return LEFT + (math.log2(lr) - low) / (high - low) * (RIGHT - LEFT)

    def y(value: float) -> float:
        return BOTTOM - (min(max(value, least), most) - least) / (most - least) * (BOTTOM - TOP)

    ticks = [2.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
    out = [_text(x(t), BOTTOM + 16, f"{t:g}", "middle") for t in ticks]
    out += [_text(LEFT - 8, y(v) + 4, number(v), "end") for v in (least + room, (least + most) / 2, most - room)]
    out += [_text(LEFT - 60, 12, metric), _text(RIGHT, HEIGHT - 8, "times the workload's learning rate", "end")]
    out.append(f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor" opacity=".3"/>')
    out += [_mark(p, x(p.lr), y(p.quality), styles[p.run]) for p in sorted(points, key=lambda p: p.best)]
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="All trials: {escape(metric)} over learning rate"'
    return f'<svg class="trials" {box} font-size="11">{"".join(out)}</svg>'


def _mark(point: Point, x: float, y: float, style: Style) -> str:
    ring = '<circle r="8" fill="none" stroke="var(--c)" stroke-width="1.5"/>' if point.best else ""
    mark = f'<path d="{style.mark}" fill="var(--c)"/>'
    at = f'transform="translate({x:.1f} {y:.1f})"'
    return f'<g class="s{point.run}" {at}><title>{escape(point.title)}</title>{mark}{ring}</g>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor" opacity=".75">{escape(text)}</text>'
    )
