"""Compression error by parameter, as a table that is also a heat map."""

import math
from typing import NamedTuple

from gossamer.record import Record

SHOWN = 60  # parameters; a page of a thousand rows helps nobody


class Layer(NamedTuple):
    name: str
    errors: list[float | None]  # by column


class Layers(NamedTuple):
    columns: list[int]  # runs, by their place in the record
    rows: list[Layer]
    total: int  # parameters that have an error in some run

    @property
    def highest(self) -> float:
        return max((e for row in self.rows for e in row.errors if e is not None), default=0.0)


def layers(record: Record) -> Layers:
    """In the model's order; of a large model those with the largest errors.

    >>> layers(Record("", "", "", "", "loss", True, 1, 2, "unshaped", 0)).rows
    []
    """
    columns = [i for i, run in enumerate(record.runs) if run.layer_errors]
    names = list(dict.fromkeys(name for i in columns for name in record.runs[i].layer_errors))
    rows = [Layer(name, [_finite(record.runs[i].layer_errors.get(name)) for i in columns]) for name in names]
    if len(rows) > SHOWN:
        worst = sorted(range(len(rows)), key=lambda k: -max((e for e in rows[k].errors if e is not None), default=0.0))
        rows = [rows[k] for k in sorted(worst[:SHOWN])]
    return Layers(columns, rows, len(names))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
