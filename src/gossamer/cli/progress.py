"""What a person sees while a trial runs: live rows on a terminal, plain lines in a pipe, nothing when told so."""

import json
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gossamer.trial.plan import Plan

Show = Callable[[dict[str, Any]], None]


class Row:
    """One contender's latest numbers."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps
        self.step, self.loss, self.quality = 0, float("nan"), float("nan")
        self.sent, self.seconds, self.wait, self.state = 0, 0.0, 0.0, "waits"

    def take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "step":
            self.step, self.loss, self.sent = event["step"], event["loss"], event["sent"]
            self.seconds, self.wait, self.state = event["seconds"], event["wait"], "trains"
        elif kind == "evaluation":
            self.quality, self.seconds = event["quality"], event["seconds"]
        elif kind in ("end", "failed"):
            self.state = "done" if kind == "end" else "failed"

    def cells(self) -> list[str]:
        pace = 1000 * self.seconds / self.step if self.step else 0.0
        left = (self.steps - self.step) * pace / 1000 if self.state == "trains" and self.step < self.steps else 0.0
        numbers = [f"{self.step}/{self.steps}", f"{self.loss:.3f}", f"{self.quality:.3f}", f"{self.sent / 1e6:.1f}"]
        return [
            escape(self.name),
            *numbers,
            f"{pace:.0f}",
            f"{1000 * self.wait:.0f}",
            f"{left:.0f}" if left else "",
            self.state,
        ]


class LiveTable(AbstractContextManager["LiveTable"]):
    """Live rows; used as a context so that the terminal is left in order."""

    def __init__(self, plan: Plan) -> None:
        self.rows = {n: Row(n, plan.steps) for n in plan.contenders}
        self.live = Live(self._table(), console=Console(stderr=True), refresh_per_second=4)

    def __enter__(self) -> "LiveTable":
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.update(self._table())
        self.live.stop()

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] in ("note", "broken"):
            text = event.get("text") or event.get("error")
            self.live.console.print(text, style="dim", markup=False, highlight=False)
        row = self.rows.get(event.get("run", ""))
        if row is not None:
            row.take(event)
            self.live.update(self._table())

    def _table(self) -> Table:
        heads = ("recipe", "step", "loss", "held out", "MB sent", "ms/step", "ms wait", "s left", "")
        table = Table(*heads, box=None, pad_edge=False)
        table.columns[0].no_wrap = True
        for column in table.columns[1:-1]:
            column.justify = "right"
        for row in self.rows.values():
            table.add_row(*row.cells())
        return table


def plain(event: dict[str, Any]) -> None:
    """One line for each evaluation and ending."""
    kind = event["event"]
    if kind == "evaluation":
        numbers = f"{event['seconds']:8.1f} s  {event['sent'] / 1e6:9.1f} MB  quality {event['quality']:.4f}"
        print(f"{event['run']:>20}  step {event['step']:5d}  {numbers}", file=sys.stderr, flush=True)
    elif kind in ("failed", "note", "decision"):
        about = f"{event['run']}: " if "run" in event else ""
        print(about + (event.get("error") or event.get("text", "")), file=sys.stderr, flush=True)


def lines_of_json(event: dict[str, Any]) -> None:
    """JSON knows no NaN: a number that ran away is null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
    print(json.dumps(plain), flush=True)


def quiet(event: dict[str, Any]) -> None:
    if event["event"] in ("failed", "note"):
        plain(event)
