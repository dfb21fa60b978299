"""A record that somebody has edited: it is shown, or it is refused by name; it is never a traceback."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from gossamer.bench.record import Evaluation, Record, Run, Step
from gossamer.bench.report import render, write_markdown

STEPS = [Step(n, n / 10, 2.0 / n, 100 * n, 0.01, 0.02, 0.03) for n in (1, 2)]
JUDGED = [Evaluation(0, 0.0, 0, 3.0), Evaluation(2, 0.2, 200, 2.0)]
TOTALS = {"wire_bytes": 200, "logical_bytes": 150, "nic_bytes": 210}
WORDS = {"layer_errors": {"w": 0.5}, "residuals": [(2, 1.0)], "decisions": [(1, "less")]}
RUNS = [
    Run("ddp", "ddp", yardstick=True, steps=STEPS, evaluations=JUDGED, **TOTALS),  # type: ignore[arg-type]
    Run("x", "bf16", "failed", "no room", "", False, STEPS, JUDGED, **WORDS),  # type: ignore[arg-type]
]
WHOLE = Record("a command", "2025-01-01T00:00:00+00:00", "lm", "", "loss", True, 10, 2, "200mbit", 0, runs=RUNS)


def places(value: Any, so_far: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in it."""
    if so_far:
        yield so_far
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*so_far, key))


def changed(table: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = deepcopy(table)
    inner: Any = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


@pytest.mark.parametrize("value", ["text", None, -1, 1e999, 1e308, True, [], {}], ids=repr)
def test_a_changed_value_is_refused_or_shown(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "record.json"
    WHOLE.write(path)
    assert Record.read(path) == WHOLE
    table = json.loads(path.read_text())
    refused = 0
    for place in places(table):
        path.write_text(json.dumps(changed(table, place, value)))
        try:
            record = Record.read(path)
        except ValueError:
            refused += 1
            continue
        write_markdown(record)
        if len(place) < 4:
            render(record)
    assert refused > 5
