"""Several records on one page: the same training on other networks, on another day, or with other recipes."""

from collections.abc import Sequence
from dataclasses import replace

from gossamer.bench.record import Record, RepeatedRuns, Run
from gossamer.bench.report.formatting import ranks_on
from gossamer.core.errors import GossamerError


class BesideError(GossamerError, ValueError):
    """Records that have nothing to compare them by."""


def beside(records: Sequence[Record]) -> Record:
    """One record with all runs of several, each named by what is different about its record; the first has the baseline.

    >>> a = Record("", "", "lm", "", "loss", True, 1, 4, "1gbit", 0, runs=[Run("ddp", "ddp")])
    >>> [run.name for run in beside([a, replace(a, rate="200mbit")]).runs]
    ['ddp (1gbit)', 'ddp (200mbit)']
    """
    first = records[0]
    for other in records[1:]:
        _refuse(first, other)
    labelled = list(zip(records, _labels(records), strict=True))
    seeds, again = list(first.trials)[1:], list[RepeatedRuns]()
    notes = [f"{label}: {r.command}" + (f" ({r.note})" if r.note else "") for r, label in labelled]
    if len({(r.hosts, r.per_host) for r in records}) > 1:
        notes.append("hosts: " + ", ".join(f"{label} {ranks_on(r.hosts, r.per_host)}" for r, label in labelled))
    if len({tuple(r.trials) for r in records}) > 1:
        notes.append("not all have the same seeds, so of each only its first is shown")
    else:
        again = [RepeatedRuns(n, [_named(run, label) for r, label in labelled for run in r.trials[n]]) for n in seeds]
    return replace(
        first,
        runs=[_named(run, label) for r, label in labelled for run in r.runs],
        again=again,
        baseline=f"{first.baseline} ({labelled[0][1]})",
        rate=", ".join(dict.fromkeys(r.rate for r in records)),
        compute=", ".join(dict.fromkeys(r.compute for r in records)),
        together=len(records),
        note="Several records, on one page. " + "; ".join(notes) + ".",
    )


def _refuse(first: Record, other: Record) -> None:
    for what, mine, theirs in (
        ("workload", first.workload, other.workload),
        ("metric", first.metric, other.metric),
        ("number of parameters", first.parameters, other.parameters),
        ("comparison", _compared(first), _compared(other)),
    ):
        if mine != theirs:
            raise BesideError(
                f"these records do not go on one page: the {what} is {mine} in the first and {theirs} in another"
            )


def _compared(record: Record) -> str:
    """Of emulated computing no loss means anything, and where steps are compared no quality is a target."""
    return ("of emulated steps" if record.compute else "of steps") if record.timing else "of quality"


def _labels(records: Sequence[Record]) -> list[str]:
    """What tells them apart, in a word."""
    for found in (
        [r.rate for r in records],
        [f"{r.hosts} hosts" for r in records],
        [f"seed {r.seed}" for r in records],
        [r.created[:10] for r in records],
    ):
        if len(set(found)) == len(records) and all(found):
            return found
    return [str(i) for i in range(1, len(records) + 1)]


def _named(run: Run, label: str) -> Run:
    return replace(run, name=f"{run.name} ({label})")
