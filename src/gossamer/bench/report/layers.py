"""Compression error by parameter: a line for each run, and a table that is also a heat map."""

import math
from statistics import median
from typing import NamedTuple

from gossamer.bench.record import Record

SHOWN = 60  # parameters; a page of a thousand rows helps nobody


class LayerErrors(NamedTuple):
    name: str
    errors: list[float | None]  # by column


class Summary(NamedTuple):
    run: int  # its place in the record
    measured: int  # parameters
    exact: int  # of them, those that compression did not change
    typical: float  # the median over the others
    largest: float
    where: str  # the parameter that has it


class Layers(NamedTuple):
    summaries: list[Summary]
    exact: list[str]  # runs that were measured, and changed nothing
    rows: list[LayerErrors]
    total: int  # parameters that have an error in some run

    @property
    def columns(self) -> list[int]:
        return [s.run for s in self.summaries]

    @property
    def highest(self) -> float:
        return max((e for row in self.rows for e in row.errors if e is not None), default=0.0)


def layers(record: Record) -> Layers:
    """In the model's order; of a large model those with the largest errors.

    >>> layers(Record("", "", "", "", "loss", True, 1, 2, "unshaped", 0)).rows
    []
    """
    finite = [{name: e for name, e in run.layer_errors.items() if math.isfinite(e)} for run in record.runs]
    measured = {i: errors for i, errors in enumerate(finite) if errors}
    exact = [record.runs[i].name for i, errors in measured.items() if not any(errors.values())]
    inexact = {i: errors for i, errors in measured.items() if any(errors.values())}
    names = list(dict.fromkeys(name for errors in inexact.values() for name in errors))
    rows = [LayerErrors(name, [errors.get(name) for errors in inexact.values()]) for name in names]
    if len(rows) > SHOWN:
        worst = sorted(range(len(rows)), key=lambda k: -max(e for e in rows[k].errors if e is not None))
        rows = [rows[k] for k in sorted(worst[:SHOWN])]
    return Layers([_summary(i, errors) for i, errors in inexact.items()], exact, rows, len(names))


def _summary(run: int, errors: dict[str, float]) -> Summary:
    where, changed = max(errors, key=errors.__getitem__), [e for e in errors.values() if e]
    return Summary(run, len(errors), len(errors) - len(changed), median(changed), errors[where], where)
