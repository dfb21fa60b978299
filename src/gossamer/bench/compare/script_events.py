"""Collect the events of all ranks of one script run: rank 0's steps, every rank's losses, and why the run ended."""

from collections import deque
from dataclasses import dataclass
from math import isfinite, nan
from statistics import fmean
from time import monotonic

from gossamer.bench.compare import events
from gossamer.bench.compare.events import OnEvent, RankEvent
from gossamer.bench.compare.local import ending
from gossamer.bench.lab import name_rank
from gossamer.bench.record import Evaluation, Run, Step

LAST = 20  # last lines of a rank that its error shows
POINTS = 20  # a training loss is averaged over a twentieth of the baseline's steps, at least
PAUSE = 2.0  # seconds between two shown evaluations: a reader is no faster
HELD_OUT = "held-out loss"  # the metric, where a script tells it: less is better


@dataclass
class RankFailure:
    """How a rank failed."""

    rank: int
    why: str
    missed: bool  # it waited for another rank, whose own error says more


class ScriptEvents:
    """Events of one run. Steps are held back until the first loss, so that a refused script leaves no record."""

    def __init__(self, run: Run, per_host: int, chunk: int, show: OnEvent) -> None:
        self.run, self.per_host, self.chunk, self.show = run, per_host, chunk, show
        self.losses = dict[int, list[float]]()  # by step, of all ranks
        self.backward_losses = dict[int, list[float]]()  # what backward() was called on, by step
        self.held_out = dict[int, list[Evaluation]]()
        self.last_lines = dict[int, deque[str]]()
        self.failures = list[RankFailure]()
        self.refused = ""
        self.attached: events.ScriptAttached | None = None
        self.ended = set[int]()
        self.compiled = False
        self.totals = dict[str, list[int]]()
        self._held_back = list[Step]()
        self._unlogged = list[Step]()
        self._shown_at, self._means_of = 0.0, 0  # rows before the second are in a mean that was shown

    # ---- incoming events

    def line(self, rank: int, text: str) -> None:
        said, event = events.parsed(text)
        if event is not None:
            self._take(rank, event.what)
        if said.strip():
            self.last_lines.setdefault(rank, deque(maxlen=LAST)).append(said)

    def _take(self, rank: int, what: object) -> None:
        match what:
            case events.ScriptAttached():
                self.attached = self.attached or what
                self.run.recipe = what.recipe
            case events.UnloggedStep():
                self._took_unlogged(rank, what)
            case Step():
                self._stepped(rank, what)
            case Evaluation():
                self._evaluated(what)
            case events.RecipeChange() if not rank:  # all ranks decide alike
                self.run.decisions.append((what.step, what.text))
                self._shown(what)
            case events.ScriptEnded():
                self._ended(rank, what)
            case events.ScriptRefused():
                self.refused = self.refused or what.error
            case events.ScriptDied():
                self.failures.append(RankFailure(rank, what.error, what.missed))
            case _:
                pass

    def _shown(self, what: object) -> None:
        self.show(RankEvent(what, self.run.name))

    def _stepped(self, rank: int, row: Step) -> None:
        if isfinite(row.loss):
            self.losses.setdefault(row.step, []).append(row.loss)
        if rank:
            return
        self._held_back.append(row)
        if not self.losses and not self.held_out:
            return
        self.run.steps += self._held_back
        for kept in self._held_back:
            self._shown(kept)
        self._held_back = []
        self._show_mean()

    def _took_unlogged(self, rank: int, row: events.UnloggedStep) -> None:
        """A step of a script that has logged no loss yet. It may log one after this step, so show the step before."""
        if isfinite(row.loss):
            self.backward_losses.setdefault(row.step, []).append(row.loss)
        if rank:
            return
        if self._unlogged:
            self._shown(self._unlogged[-1])
        self._unlogged.append(Step(**vars(row)))

    def _evaluated(self, seen: Evaluation) -> None:
        self.held_out.setdefault(seen.step, []).append(seen)
        if len(self.held_out[seen.step]) == 1:
            self._shown(events.ShownEvaluation(**vars(seen), of="held out"))

    def _ended(self, rank: int, end: events.ScriptEnded) -> None:
        self.ended.add(rank)
        self.compiled |= end.compiled
        if not rank:
            self._show_mean(final=True)
        for name in ("wire_bytes", "inside_bytes", "logical_bytes", "nic_bytes"):
            value: int | None = getattr(end, name)
            if value is not None:
                self.totals.setdefault(name, []).append(value)

    def _show_mean(self, final: bool = False) -> None:
        rows = [s for s in self.run.steps[self._means_of :] if s.step in self.losses]
        if self.held_out or not rows:
            return
        early = rows[-1].step - rows[0].step + 1 < self.chunk or monotonic() < self._shown_at
        if early and not final:
            return
        self._means_of, self._shown_at = len(self.run.steps), monotonic() + PAUSE
        last, mean = rows[-1], fmean(fmean(self.losses[s.step]) for s in rows)
        self._shown(events.ShownEvaluation(last.step, last.seconds, last.sent, mean, of="mean loss"))

    # ---- results

    @property
    def goes_by_backward(self) -> bool:
        """True if the script logged no loss, so the values of backward() are used."""
        return bool(self.backward_losses) and (not self.losses or self.losses is self.backward_losses)

    def killed(self, rank: int, code: int) -> None:
        """Note the rank that failed first; a killed rank could not report it itself."""
        if not any(each.rank == rank for each in self.failures):
            self.failures.insert(0, RankFailure(rank, ending(code), False))

    def conclude(self, ranks: int) -> None:
        """Write status, error and totals of the run into its record."""
        run = self.run
        if self.goes_by_backward:
            run.steps, self.losses = self._unlogged, self.backward_losses
        else:
            run.steps += self._held_back
        self._held_back = []
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
        if not self.failures:
            missing = next((r for r in range(ranks) if r not in self.ended), 0)
            return self._with_last_lines(missing, "ended without a message")
        first = min(self.failures, key=lambda each: each.missed)
        return self._with_last_lines(first.rank, first.why)

    def _with_last_lines(self, rank: int, why: str) -> str:
        lines = "\n".join(f"  {line}" for line in self.last_lines.get(rank, []))
        return f"{name_rank(rank, self.per_host)}: {why}" + (f"\nits last lines:\n{lines}" if lines else "")


def judge(runs: list[Run], events_of: dict[str, ScriptEvents], chunk: int) -> str:
    """Set the evaluations of every run; return the name of their metric.

    The metric is held-out quality if every run logged it, but for those that were cut off before they could, else the
    training loss, averaged over equal windows.
    """
    heard = [events_of[r.name] for r in runs if r.name in events_of and (r.steps or events_of[r.name].held_out)]
    whole = [h for h in heard if h.held_out or h.run.status == "ok"]
    if whole and all(h.held_out for h in whole):
        for h in heard:
            h.run.evaluations = [_mean(seen) for _, seen in sorted(h.held_out.items())]
        return HELD_OUT
    window = max(chunk, *(-(-h.run.done // POINTS) for h in heard)) if heard else chunk
    for h in heard:
        h.run.evaluations = _windows(h.run.steps, window)
    return f"training loss (mean over {window} steps)"


def _mean(seen: list[Evaluation]) -> Evaluation:
    """Mean over the ranks that evaluated at this step, with the first one's clock."""
    first = seen[0]
    return Evaluation(first.step, first.seconds, first.sent, fmean(e.quality for e in seen))


def _windows(rows: list[Step], window: int) -> list[Evaluation]:
    """Means over windows of steps; the last window overlaps the one before it. NaN where no loss is finite.

    >>> rows = [Step(i, 1.0 * i, 10.0 - i, None) for i in range(1, 8)]
    >>> [(e.step, e.quality) for e in _windows(rows, 3)]
    [(3, 8.0), (6, 5.0), (7, 4.0)]
    """
    if rows and not isfinite(rows[-1].loss):  # of the steps after the last loss that was logged
        rows = rows[:-1]
    found = dict[int, list[Step]]()
    for row in rows:
        found.setdefault((row.step - 1) // window, []).append(row)
    if rows:  # alone, the steps that are left over would be fewer, and their mean noisier
        found[(rows[-1].step - 1) // window] = [row for row in rows if row.step > rows[-1].step - window]
    return [Evaluation(some[-1].step, some[-1].seconds, some[-1].sent, _finite_mean(some)) for some in found.values()]


def _finite_mean(rows: list[Step]) -> float:
    losses = [row.loss for row in rows if isfinite(row.loss)]
    return fmean(losses) if losses else nan
