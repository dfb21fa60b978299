"""What the judged runs of a claim say, by study, case, row and seed; and the figures drawn from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

Rows = dict[str, list[float]]  # named rows of numbers: a curve is two of them


@dataclass
class ClaimRun:
    """One run that was finished: a trial of a search, or a run that is judged."""

    study: str
    case: str
    stage: str  # "tuning", "final" or "judged"
    number: int  # of the trial
    seed: int
    settings: dict[str, str]
    rows: Rows
    seconds: float  # by the clock: no property of the claim
    processor: float  # seconds of a processor
    error: str = ""  # why it diverged

    @property
    def key(self) -> "Key":
        return (self.study, self.case, self.stage, self.number, self.seed)


Key = tuple[str, str, str, int, int]


@dataclass
class Line:
    """One line of a figure: its name, and pairs of x and y."""

    name: str
    points: list[list[float]]


@dataclass
class ClaimFigure:
    """A chart as data, from which the page's figure is drawn."""

    id: str
    title: str
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    lines: list[Line] = field(default_factory=list[Line])


class Evidence:
    """The judged runs. What a case did not write, or a run that diverged, is not a number."""

    def __init__(self, runs: Sequence[ClaimRun]) -> None:
        self._runs = {(r.study, r.case, r.seed): r for r in runs if r.stage == "judged"}

    def cases(self, study: str) -> list[str]:
        return list(dict.fromkeys(case for found, case, _ in self._runs if found == study))

    def run(self, study: str, case: str) -> dict[int, ClaimRun]:
        """The runs of a case, by seed."""
        return {seed: r for (s, c, seed), r in sorted(self._runs.items()) if (s, c) == (study, case)}

    def rows(self, study: str, case: str, row: str) -> dict[int, list[float]]:
        """By seed, a whole row."""
        return {seed: r.rows.get(row, []) for seed, r in self.run(study, case).items()}

    def last(self, study: str, case: str, row: str) -> dict[int, float]:
        """By seed, the last value of a row; not a number where the run diverged."""
        found = self.run(study, case)
        return {s: math.nan if r.error else _end(r.rows.get(row, []), -1) for s, r in found.items()}

    def first(self, study: str, case: str, row: str) -> dict[int, float]:
        return {s: _end(r.rows.get(row, []), 0) for s, r in self.run(study, case).items()}

    def mean_line(self, study: str, case: str, x: str, y: str, name: str = "") -> Line:
        """The mean over seeds of y, at the x of the first seed; ends where the first of them ends."""
        xs, ys = self.rows(study, case, x), self.rows(study, case, y)
        across = next(iter(xs.values()), [])
        up = [fmean(column) for column in zip(*ys.values(), strict=False)]
        return Line(name or case, [[a, b] for a, b in zip(across, up, strict=False)])


def by_steps_and_bytes(evidence: Evidence, study: str, cases: Sequence[str], quality: str) -> list[ClaimFigure]:
    """Two charts of a contest: held-out quality over the bytes of a rank, and over steps."""
    sent, steps = ([evidence.mean_line(study, case, x, "quality") for case in cases] for x in ("sent", "steps"))
    return [
        ClaimFigure("sent", f"Held-out {quality} over bytes of a rank", "bytes", quality, log_x=True, lines=sent),
        ClaimFigure("steps", f"Held-out {quality}", "steps", quality, lines=steps),
    ]


def mean(values: Mapping[int, float]) -> float:
    """Over seeds."""
    return fmean(values.values()) if values else math.nan


def _end(row: list[float], place: int) -> float:
    return row[place] if row else math.nan
