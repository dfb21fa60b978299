"""The page of a plan: sliders over the planner's own replays, one file that needs no network to open."""

import math
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from sys import byteorder
from typing import Any

from markupsafe import Markup

from gossamer.bench.report.charts import Axis, BarChart, LineChart
from gossamer.bench.report.grid import Grid
from gossamer.bench.report.page import embed
from gossamer.bench.report.pages import PAGE, asset, filled
from gossamer.bench.report.palette import INK, MARKS, PARTS, Style, hues
from gossamer.core import files
from gossamer.costs.quantities import say_size
from gossamer.planning.plan import TrainingPlan
from gossamer.planning.rates import TIE
from gossamer.planning.verdict import SENTENCES, also, dense_name

SMALLEST, STEPS = 1e-6, 2500  # seconds, and codes of a factor e: two bytes hold a number to 2 in 10,000
MOST = 2**16 - 1  # of two bytes
SHOWN = 5  # recipes whose lines are drawn at first

BARS = BarChart(
    "plan-steps",
    "Where a step's time goes",
    "The fastest first. Computing is forward, backward and the optimizer; work is what recipes compute, and network what they "
    "send, as far as nothing hides it.",
    ["computing", "work", "network"],
    [],
)
CURVE = LineChart(
    "plan-rates",
    "A step over the link's rate",
    "Rings mark where a recipe begins to pay, or ceases to: it is faster than the first baseline by over 5 %.",
    Axis("rate of a link", "rate", log=True),
    Axis("seconds a step", "seconds", log=True),
)


def render(plan: TrainingPlan, grid: Grid) -> str:
    """The whole page as one HTML document."""
    return filled(
        "planned.html",
        called=f"{plan.model.name}, planned",
        plan=plan,
        styles=styles(grid),
        parts=PARTS,
        say_size=say_size,
        baselines=grid.baselines,
        recipes=[name for name in grid.seconds if name not in grid.baselines],
        sources=sorted({row.work for row in plan.possible if row.work}),
        refused=[row for row in plan.recipes if row.error],
        simulated=[row.name for row in plan.possible if row.simulated],
        data=Markup(embed(data(plan, grid))),
        scripts=[Markup(asset(name)) for name in ("scale.js", "names.js", "lines.js", "bars.js", "planned.js")],
    )


def write_html(plan: TrainingPlan, grid: Grid, path: Path, force: bool = False) -> None:
    """Over nothing but an earlier report, or with `force` any file."""
    files.write(path, render(plan, grid), PAGE, force)


def styles(grid: Grid) -> list[Style]:
    """Baselines have no hue."""
    based = [Style(INK, MARKS[i % len(MARKS)], True) for i in range(len(grid.baselines))]
    return [*based, *hues(len(grid.seconds) - len(based))]


def data(plan: TrainingPlan, grid: Grid) -> dict[str, Any]:
    """What the page's script reads: coded seconds, axes, verdicts and the place to begin at."""
    cluster, names, steps = plan.cluster, list(grid.seconds), _steps(grid)
    kinds = sorted(set(grid.verdicts))
    rate = min(max(8 * cluster.rate, 8 * grid.rates[0]), 8 * grid.rates[-1])
    return {
        "runs": [
            {"name": name, "mark": style.mark, "dashed": style.dashed} for name, style in zip(names, styles(grid))
        ],
        "baselines": len(grid.baselines),
        "shown": sorted({*range(len(grid.baselines)), *_often_best(grid, names)}),
        "axes": {
            "hosts": grid.hosts,
            "seconds": grid.computing,
            "latency": grid.latencies,
            "rate": [8 * rate for rate in grid.rates],
        },
        "at": {
            "hosts": list(grid.hosts).index(cluster.nodes),
            "seconds": plan.model.computing,
            "latency": min(max(cluster.latency, 1e-5), grid.latencies[-2]),
            "rate": rate,
        },
        "code": {"smallest": SMALLEST, "steps": steps},
        "seconds": [_cells(grid, name, steps) for name in names],
        "verdicts": [kinds.index(each) for each in grid.verdicts],
        "kinds": [list(each) for each in kinds],
        "sentences": {
            k: s.replace("{dense}", dense_name(plan)).replace("{also}", also(plan)) for k, s in SENTENCES.items()
        },
        "tie": TIE,
        "charts": [asdict(BARS), asdict(CURVE)],
    }


def _often_best(grid: Grid, names: Sequence[str]) -> list[int]:
    """The recipes that most verdicts speak of."""
    said = [each.best for each in grid.verdicts if each.best]
    often = sorted({*said}, key=lambda name: -said.count(name))
    return [names.index(name) for name in often[:SHOWN]]


def _steps(grid: Grid) -> int:
    """Codes of a factor e: fewer where the longest step, of days on the slowest link, would need more than two bytes."""
    longest = max((s.step for cells in grid.seconds.values() for s in cells if s is not None), default=SMALLEST)
    return min(STEPS, int((MOST - 1) / math.log(max(longest / SMALLEST, 2))))


def _cells(grid: Grid, name: str, steps: int) -> list[str]:
    """A step, what of it is the recipe's work, and what is the network's; a step of no seconds cannot run there."""
    parts = [(0.0, 0.0, 0.0) if s is None else (s.step, s.work, s.network) for s in grid.seconds[name]]
    return [coded(column, steps) for column in zip(*parts, strict=True)]


def coded(seconds: Iterable[float], steps: int = STEPS) -> str:
    """Seconds as two bytes each, on a logarithmic scale.

    >>> coded([0.0, 1e-6])
    'AAABAA=='
    """
    found = array("H", (0 if s < SMALLEST else 1 + round(steps * math.log(s / SMALLEST)) for s in seconds))
    if byteorder == "big":
        found.byteswap()
    return b64encode(found.tobytes()).decode()
