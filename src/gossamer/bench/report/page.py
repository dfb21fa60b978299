"""The page: one HTML file with everything in it, that needs no network to open."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from gossamer.bench.record import Record, finite
from gossamer.bench.report import formatting
from gossamer.bench.report.charts import charts
from gossamer.bench.report.headline import headline
from gossamer.bench.report.layers import layers
from gossamer.bench.report.pages import PAGE, asset, filled
from gossamer.bench.report.palette import PARTS, styles
from gossamer.bench.report.study import Study, study_of
from gossamer.core import files


def render(record: Record) -> str:
    """The whole report as one HTML document.

    >>> page = render(Record("gossamer compare", "", "lm", "", "loss", True, 1, 4, "200mbit", 0))
    >>> page.startswith("<!doctype html>"), "No run left a result." in page
    (True, True)
    """
    study = study_of(record)
    return filled(
        "page.html",
        study=study,
        record=record,
        head=headline(study),
        metric=formatting.quality(record.metric),
        failed=[r for r in study.rows if r.run.status == "failed"],
        interrupted=[r for r in study.rows if r.run.status == "interrupted"],
        layers=layers(record),
        styles=styles(record),
        parts=PARTS,
        longest=max((r.reached_bounds[1] if r.reached_bounds else r.reached or 0.0 for r in study.rows), default=0.0),
        data=Markup(embed(data(study))),
        scripts=[Markup(asset(name)) for name in ("scale.js", "names.js", "lines.js", "bars.js", "page.js")],
    )


def write_html(record: Record, path: Path, force: bool = False) -> None:
    """Render to a file: a new one, an earlier report, or with `force` any other; what was there survives a full disk."""
    files.write(Path(path), render(record), PAGE, force)


def data(study: Study) -> dict[str, Any]:
    """What the page's script draws from."""
    look = styles(study.record)
    base = study.base
    return {
        "runs": [
            {"name": run.name, "mark": look[i].mark, "dashed": look[i].dashed}
            for i, run in enumerate(study.record.runs)
        ],
        "baseline": base.index if base else None,
        "winner": study.first[0].index if study.first else None,
        "charts": [asdict(chart) for chart in charts(study)],
        "rows": [
            {name: value for name, value in vars(row).items() if name != "run"}
            | {"name": row.run.name, "logical": row.run.logical_bytes, "wire": row.run.sent, "nic": row.run.nic_bytes}
            for row in study.rows
        ],
    }


def embed(value: dict[str, Any]) -> str:
    """JSON that may stand inside a script element, whatever a name or an error message contains.

    >>> embed({"a": "</script>"})
    '{"a":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
