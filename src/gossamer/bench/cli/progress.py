"""Show progress of a comparison: live rows on a terminal, plain lines in a pipe, nothing with --quiet."""

import json
import math
import sys
from contextlib import AbstractContextManager
from time import monotonic
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gossamer.bench.compare import events
from gossamer.bench.compare.events import RankEvent, facts_of
from gossamer.bench.compare.plan import ComparePlan
from gossamer.bench.compare.script_observer import ScriptPlan
from gossamer.bench.record import Evaluation, Step, finite
from gossamer.bench.report.formatting import fixed, seconds, size


class ProgressRow:
    """Latest numbers of one run."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps, self.state = name, steps, "to come"
        self.step, self.trained, self.loss, self.quality = 0, 0, math.nan, math.nan
        self.sent: int | None = None
        self.seconds, self.waited = 0.0, 0.0
        self.before = self.first = 0.0  # seconds of an earlier session, and of the first step, which is slower
        self.lost = 0  # steps and rounds lost to values that are not finite
        self.measured = False  # True if the run measures how long it waits
        self.judged = "held out"  # name of the shown quality

    def take(self, what: object) -> None:
        match what:
            case Step():
                self._step(what)
            case Evaluation():
                # Messages in flight at the last step have arrived by now.
                self.quality, self.seconds, self.sent = what.quality, what.seconds, what.sent
                if isinstance(what, events.ShownEvaluation):
                    self.judged = what.of
            case events.Entered():
                self.step, self.state = what.done, "ready"
            case events.SpoiltCounts():
                self.lost = what.skipped_steps + what.dropped_rounds
            case events.Ended() | events.Failed():
                self.state = "done" if isinstance(what, events.Ended) else "failed"
            case _:
                pass

    def _step(self, row: Step) -> None:
        if not self.trained:
            self.before, self.first = self.seconds, row.seconds - self.seconds
        self.step, self.loss, self.trained = row.step, row.loss, self.trained + 1
        self.seconds = row.seconds
        self.sent = self.sent if row.sent is None else row.sent  # where ranks share a link, evaluations have it
        # A run that has had its steps trains on for the baseline's quality; the steps of a script are not known.
        self.state = "chases" if 0 < self.steps < self.step else "trains"
        if row.wait is not None:
            self.measured, self.waited = True, self.waited + row.wait

    @property
    def pace(self) -> float:
        """Seconds per step."""
        return self.seconds / self.step if self.step else 0.0

    @property
    def later_pace(self) -> float:
        """Seconds per step from the second step on, if there is one."""
        return (self.seconds - self.before - self.first) / (self.trained - 1) if self.trained > 1 else self.pace

    @property
    def left(self) -> float:
        """Seconds of training left until the run has had its steps; later steps cannot be predicted."""
        return max(0, self.steps - self.step) * self.later_pace if self.state == "trains" else 0.0

    def numbers(self) -> dict[str, str]:
        """Cells of the row; means are over all steps so far, unknown values are empty."""
        return {
            "step": f"{self.step}/{self.steps}" if self.steps and self.step <= self.steps else str(self.step),
            "loss": fixed(self.loss, 3) if self.trained else "",
            "quality": "" if math.isnan(self.quality) else fixed(self.quality, 4),
            "sent": "" if self.sent is None else size(self.sent),
            "a step": seconds(self.pace) if self.step else "",
            "waits": seconds(self.waited / self.trained) if self.measured else "",
            "left": seconds(self.left) if self.left else "",
        }


class LiveTable(AbstractContextManager["LiveTable"]):
    """Live table; a context manager that restores the terminal."""

    def __init__(self, plan: ComparePlan | ScriptPlan, console: Console | None = None) -> None:
        self.rows = {n: ProgressRow(n, plan.steps) for n in plan.contenders}
        self.began = monotonic()
        self.ranks = 0  # ranks that have started
        self.training_since = 0.0
        self.judged = False  # True if any run has trained and been evaluated
        self.live = Live(console=console or Console(stderr=True), refresh_per_second=4, get_renderable=self.table)

    def __enter__(self) -> "LiveTable":
        self.live.start()
        return self

    def __exit__(self, *of: object) -> None:
        for row in self.rows.values():
            row.state = row.state if row.state in ("done", "failed") else "cut off"
        self.live.stop()

    def show(self, event: RankEvent) -> None:
        if isinstance(event.what, events.Note):
            self.live.console.print(event.what.text, style="dim", markup=False, highlight=False)
        elif isinstance(event.what, events.Started):
            self.ranks = event.what.size
        row = self.rows.get(event.run)
        if row is None:
            return
        if isinstance(event.what, Step) and not self.training_since:
            self.training_since = monotonic() - max(0.0, event.what.seconds - row.seconds)
        row.take(event.what)
        self.judged = self.judged or (isinstance(event.what, Evaluation) and row.trained > 0)

    def table(self) -> Table:
        first = next(iter(self.rows.values()))
        heads = [first.judged if head == "quality" else head for head in [*first.numbers(), ""]]
        table = Table(box=None, pad_edge=False, caption=self._clock(), caption_justify="left")
        table.add_column("recipe", overflow="fold")
        for head in heads:
            table.add_column(head, justify="right" if head else "left", no_wrap=True)
        for row in self.rows.values():
            table.add_row(escape(row.name), *row.numbers().values(), row.state + _lost(row))
        return table

    def _clock(self) -> str:
        past = f"{_minutes(monotonic() - self.began)} past"
        if not self.training_since:
            return f"{past}, {self._starting()}"
        left = sum(_expected(row, self.rows) for row in self.rows.values()) * self._stretch()
        return f"{past}, about {_minutes(left)} left" if left and self.judged else past

    def _starting(self) -> str:
        """Text for the time before the first step."""
        if not self.ranks:
            return "ranks are starting"
        ready = sum(row.state != "to come" for row in self.rows.values())
        return f"{self.ranks} ranks are there, {ready} of {len(self.rows)} recipes are ready"

    def _stretch(self) -> float:
        """Ratio of wall clock time, which includes evaluations, to training time, without first steps."""
        begun = [row for row in self.rows.values() if row.trained]
        first = sum(row.first for row in begun)
        trained = sum(row.seconds - row.before for row in begun) - first
        return max(1.0, (monotonic() - self.training_since - first) / trained) if trained > 0 else 1.0


def _expected(row: ProgressRow, rows: dict[str, ProgressRow]) -> float:
    """Seconds left for a run; one that has not trained yet gets the mean pace of the others."""
    if row.state not in ("to come", "ready"):
        return row.left
    paces = [r.later_pace for r in rows.values() if r.trained]
    return row.steps * sum(paces) / len(paces) if paces else 0.0


def _minutes(time: float) -> str:
    """
    >>> _minutes(65.4)
    '1:05'
    """
    return f"{int(time) // 60}:{int(time) % 60:02d}"


class PlainLines:
    """Prints one line per evaluation, note and failure."""

    def __init__(self, plan: ComparePlan | ScriptPlan) -> None:
        self.rows = {n: ProgressRow(n, plan.steps) for n in plan.contenders}
        self.width = min(24, max(map(len, self.rows)))

    def show(self, event: RankEvent) -> None:
        if (row := self.rows.get(event.run)) is not None:
            row.take(event.what)
        if row is not None and isinstance(event.what, Evaluation):
            said(f"{row.name:>{self.width}}  {_line(row)}")
        else:
            troubles(event)


def _line(row: ProgressRow) -> str:
    """Line of one evaluation; unknown numbers are left out."""
    numbers = row.numbers()
    wide = 2 * len(str(row.steps)) + 2
    told = [f"step {numbers['step']:>{wide}}", f"{seconds(row.seconds):>7}"]
    kinds = {"quality": row.judged} | {name: name for name in ("loss", "sent", "a step", "waits", "left")}
    told += [f"{name} {numbers[kind]}" for kind, name in kinds.items() if numbers[kind]]
    return "  ".join(told) + _lost(row)


def _lost(row: ProgressRow) -> str:
    return f", {row.lost} spoilt" if row.lost else ""


def said(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def troubles(event: RankEvent) -> None:
    """Print failures, notes and decisions of controllers."""
    match event.what:
        case events.Failed(text) | events.Note(text) | events.RecipeChange(text=text):
            said(f"{event.run}: {text}" if event.run else text)
        case _:
            pass


def events_as_json(event: RankEvent) -> None:
    json_line(facts_of(event))


def json_line(facts: dict[str, Any]) -> None:
    """Print facts as a JSON line; NaN and infinity become null."""
    print(json.dumps(finite(facts), allow_nan=False), flush=True)


def quiet(event: RankEvent) -> None:
    if isinstance(event.what, events.Failed | events.Note):
        troubles(event)
