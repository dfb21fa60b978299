"""Collect the events of all ranks of one script run: rank 0's steps, every rank's losses, and why the run ended."""

import json
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from time import monotonic
from typing import Any

from gossamer.bench.compare.plan import MARK
from gossamer.bench.lab import name_rank
from gossamer.bench.record import Evaluation, Run, Step

LAST = 20  # last lines of a rank that its error shows
POINTS = 20  # a training loss is averaged over a twentieth of the baseline's steps, at least
PAUSE = 2.0  # seconds between two shown evaluations: a reader is no faster

Show = Callable[[dict[str, Any]], None]


@dataclass
class Death:
    """How a rank failed."""

    rank: int
    why: str
    missed: bool  # it waited for another rank, whose own error says more


class ScriptEvents:
    """Events of one run. Steps are held back until the first loss, so that a refused script leaves no record."""

    def __init__(self, run: Run, per_host: int, chunk: int, show: Show) -> None:
        self.run, self.per_host, self.chunk, self.show = run, per_host, chunk, show
        self.losses = dict[int, list[float]]()  # by step, of all ranks
        self.unsaid = dict[int, list[float]]()  # values that backward() was called on, for a script that logs no loss
        self.held_out = dict[int, list[Evaluation]]()
        self.words = dict[int, deque[str]]()
        self.deaths = list[Death]()
        self.refused = ""
        self.attached = dict[str, Any]()
        self.ended = set[int]()
        self.compiled = False
        self.totals = dict[str, list[int]]()
        self._kept = list[Step]()
        self._unsaid = list[Step]()
        self._shown_at, self._shown = 0.0, 0

    # ---- incoming events

    def line(self, rank: int, text: str) -> None:
        said, mark, rest = text.partition(MARK)
        if mark:
            try:
                event = json.loads(rest)
                getattr(self, f"_on_{event.pop('event')}")(rank, **event)
            except (ValueError, KeyError, TypeError, AttributeError):  # cut short by a kill, or not an event
                said = text
        if said.strip():
            self.words.setdefault(rank, deque(maxlen=LAST)).append(said)

    def _on_attached(self, rank: int, **facts: Any) -> None:
        self.attached = self.attached or facts
        self.run.recipe = facts["recipe"]

    def _on_step(self, rank: int, **facts: Any) -> None:
        row = Step(**facts)
        if isfinite(row.loss):
            self.losses.setdefault(row.step, []).append(row.loss)
        if rank:
            return
        self._kept.append(row)
        if not self.losses and not self.held_out:
            return
        self.run.steps += self._kept
        for kept in self._kept:
            self.show({"event": "step", "run": self.run.name, **vars(kept)})
        self._kept = []
        self._show_mean()

    def _on_heard(self, rank: int, **facts: Any) -> None:
        """A step of a script that has logged no loss yet. It may log one after this step, so show the step before."""
        row = Step(**facts)
        if isfinite(row.loss):
            self.unsaid.setdefault(row.step, []).append(row.loss)
        if rank:
            return
        if self._unsaid:
            self.show({"event": "step", "run": self.run.name, **vars(self._unsaid[-1])})
        self._unsaid.append(row)

    def _on_evaluation(self, rank: int, **facts: Any) -> None:
        seen = Evaluation(**facts)
        self.held_out.setdefault(seen.step, []).append(seen)
        if len(self.held_out[seen.step]) == 1:
            self.show({"event": "evaluation", "run": self.run.name, "of": "held out", **facts})

    def _on_end(self, rank: int, compiled: bool, **totals: int | None) -> None:
        self.ended.add(rank)
        self.compiled |= compiled
        if not rank:
            self._show_mean(final=True)
        for name, value in totals.items():
            if value is not None:
                self.totals.setdefault(name, []).append(value)

    def _on_refused(self, rank: int, error: str) -> None:
        self.refused = self.refused or error

    def _on_died(self, rank: int, error: str, missed: bool) -> None:
        self.deaths.append(Death(rank, error, missed))

    def _show_mean(self, final: bool = False) -> None:
        rows = [s for s in self.run.steps[self._shown :] if s.step in self.losses]
        if self.held_out or not rows:
            return
        early = rows[-1].step - rows[0].step + 1 < self.chunk or monotonic() < self._shown_at
        if early and not final:
            return
        self._shown, self._shown_at = len(self.run.steps), monotonic() + PAUSE
        last, mean = rows[-1], fmean(fmean(self.losses[s.step]) for s in rows)
        where = {"step": last.step, "seconds": last.seconds, "sent": last.sent}
        self.show({"event": "evaluation", "run": self.run.name, "of": "mean loss", **where, "quality": mean})

    # ---- results

    @property
    def goes_by_backward(self) -> bool:
        """True if the script logged no loss, so the values of backward() are used."""
        return bool(self.unsaid) and (not self.losses or self.losses is self.unsaid)

    def killed(self, rank: int, code: int) -> None:
        """Note the rank that failed first; a killed rank could not report it itself."""
        if any(d.rank == rank for d in self.deaths):
            return
        number = -code if code < 0 else code - 128
        how = (
            f"was killed by {signal.Signals(number).name}"
            if number in set(signal.Signals)
            else f"ended with code {code}"
        )
        hint = " (the kernel does this when memory runs out)" if number == signal.SIGKILL else ""
        self.deaths.insert(0, Death(rank, how + hint, False))

    def conclude(self, ranks: int) -> None:
        """Write status, error and totals of the run into its record."""
        run = self.run
        if self.goes_by_backward:
            run.steps, self.losses = self._unsaid, self.unsaid
        else:
            run.steps += self._kept
        self._kept = []
        for row in run.steps:
            if row.step in self.losses:
                row.loss = fmean(self.losses[row.step])
        if len(self.ended) == ranks:
            run.status, run.error = "ok", ""
            mean = {name: int(fmean(values) * self.per_host) for name, values in self.totals.items()}
            nic = self.totals.get("nic_bytes")  # all ranks of a host read one counter
            run.wire_bytes, run.inside_bytes = mean.get("wire_bytes"), mean.get("inside_bytes")
            run.logical_bytes, run.nic_bytes = mean.get("logical_bytes"), int(fmean(nic)) if nic else None
        else:
            run.status, run.error = "failed", self._why(ranks)

    def _why(self, ranks: int) -> str:
        """Error of the rank that failed first by itself, with its last lines."""
        if not self.deaths:
            missing = next((r for r in range(ranks) if r not in self.ended), 0)
            return self._with_last_words(missing, "ended without a message")
        first = min(self.deaths, key=lambda d: d.missed)
        return self._with_last_words(first.rank, first.why)

    def _with_last_words(self, rank: int, why: str) -> str:
        words = "\n".join(f"  {line}" for line in self.words.get(rank, []))
        return f"{name_rank(rank, self.per_host)}: {why}" + (f"\nits last lines:\n{words}" if words else "")


def judge(runs: list[Run], events: dict[str, ScriptEvents], chunk: int) -> str:
    """Set the evaluations of every run; return the name of their metric.

    The metric is held-out quality if every run logged it, else the training loss, averaged over equal windows.
    """
    heard = [events[r.name] for r in runs if r.name in events and (r.steps or events[r.name].held_out)]
    if heard and all(h.held_out for h in heard):
        for h in heard:
            h.run.evaluations = [_mean(seen) for _, seen in sorted(h.held_out.items())]
        return "held-out loss"
    window = max(chunk, *(-(-h.run.done // POINTS) for h in heard)) if heard else chunk
    for h in heard:
        h.run.evaluations = _windows(h.run.steps, window)
    return f"training loss (mean over {window} steps)"


def _mean(seen: list[Evaluation]) -> Evaluation:
    """Mean over the ranks that evaluated at this step, with the first one's clock."""
    first = seen[0]
    return Evaluation(first.step, first.seconds, first.sent, fmean(e.quality for e in seen))


def _windows(rows: list[Step], window: int) -> list[Evaluation]:
    """
    >>> rows = [Step(i, 1.0 * i, 10.0 - i, None) for i in range(1, 7)]
    >>> [(e.step, e.quality) for e in _windows(rows, 3)]
    [(3, 8.0), (6, 5.0)]
    """
    found = dict[int, list[Step]]()
    for row in rows:
        if isfinite(row.loss):
            found.setdefault((row.step - 1) // window, []).append(row)
    return [
        Evaluation(some[-1].step, some[-1].seconds, some[-1].sent, fmean(s.loss for s in some))
        for some in found.values()
    ]
