"""Build the record of a comparison from the events of its ranks; it is valid at any moment."""

import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.bench.compare import events
from gossamer.bench.compare.events import OnEvent, RankEvent
from gossamer.bench.compare.journal import Journal
from gossamer.bench.compare.local import ending
from gossamer.bench.lab import name_rank
from gossamer.bench.record import Evaluation, Record, Run, Step
from gossamer.core.errors import GossamerError

WORDS = 200  # lines of the ranks that are kept, in case they show the cause of a failure


class RecordBuilder:
    """Turns rank 0's events into the record, and keeps the other lines of the ranks for error messages."""

    def __init__(
        self, record: Record, on_event: OnEvent, path: Path | None = None, earlier: Record | None = None
    ) -> None:
        self.record, self.on_event = record, on_event
        self.journal = Journal(record, path, earlier)
        self.complaints = deque[str](maxlen=WORDS)
        self.finished = set[str]()
        self.lost = self.broken = ""  # the rank that was killed; the error that ended rank 0

    def follow(self, work: Callable[[], int]) -> tuple[Record, int]:
        """Run `work` and set the status of every run, however it ends; return the record and the exit code."""
        try:
            code = int(work() != 0)
        except KeyboardInterrupt as stop:
            number = int(stop.args[0] if stop.args else signal.SIGINT)
            code, self.lost, self.broken = 128 + number, f"interrupted by {signal.Signals(number).name}", ""
        except GossamerError as error:
            code, self.broken = 1, str(error)
        self._account_for_the_missing(code)
        return self.record, code

    def line(self, number: int | None, text: str) -> None:
        said, event = events.parsed(text)
        if event is not None and self._is_ours(event):
            self.take(event)
        else:
            said = text
        if said.strip():
            self.complaints.append(said if number is None else f"[{self._who(number)}] {said}")

    def _is_ours(self, event: RankEvent) -> bool:
        return not event.run or self.record.run(event.run) is not None

    def say(self, text: str) -> None:
        self.on_event(RankEvent(events.Note(text)))

    def unshaped(self, reason: str) -> None:
        self.record.note, self.record.rate = f"unshaped: {reason}", "unshaped"
        self.say(
            f"no lab here, so the network is as fast as this machine, and times say little about a slow network: {reason}"
        )

    def ended(self, number: int, code: int) -> None:
        """Note the rank that failed first, if a signal ended it: it cannot report that itself."""
        if code < 0 or code > 128:
            self.lost = f"{name_rank(number, self.record.per_host)} {ending(code)}"

    def _who(self, number: int) -> str:
        return str(number) if self.record.per_host == 1 else name_rank(number, self.record.per_host)

    def take(self, event: RankEvent) -> None:
        """Add one event to the record, and pass it on."""
        run = self.record.run(event.run) if event.run else None
        if isinstance(event.what, events.Broken):
            self.broken = event.what.error
        elif run is not None:
            _note(run, event.what)
            if isinstance(event.what, events.Ended | events.Failed):
                self.finished.add(run.name)
        if not isinstance(event.what, events.History):  # its events were shown when they happened
            self.on_event(event)
        if why := self.journal.keep_up():
            self.say(f"the record cannot be written: {why}; it is tried again until the end")

    def _account_for_the_missing(self, code: int) -> None:
        """Mark every run that neither ended nor failed as cut off, with the reason."""
        missing = [run for run in self.record.runs if run.name not in self.finished]
        if not missing:
            return
        why = "; ".join(filter(None, [self.lost, self.broken])) or "; ".join(list(self.complaints)[-5:])
        why = why or f"the ranks ended early, with code {code}"
        for run in missing:
            run.status, run.error = "interrupted" if code > 128 else "failed", why
        if code == 1:
            self.say(why)
            if self.complaints:
                self.say("the ranks' last lines:\n" + "\n".join(list(self.complaints)[-20:]))


def _note(run: Run, what: Any) -> None:
    match what:
        case events.Entered():
            run.recipe = what.recipe
        case events.History():  # events of a resumed run from before its checkpoint
            for name, facts in what.events:
                _note(run, events.what_of(name, facts))
        case Step():
            run.steps.append(what)
        case Evaluation():
            run.evaluations.append(what)
        case events.ResidualNorm():
            run.residuals.append((what.step, what.norm))
        case events.RecipeChange():
            run.decisions.append((what.step, what.text))
        case events.SpoiltCounts():
            run.skipped_steps, run.dropped_rounds = what.skipped_steps, what.dropped_rounds
            run.spoilt = what.by
        case events.ModelAges():
            run.staleness = what.ages
        case events.CompressionErrors():
            run.layer_errors |= what.errors
        case events.Failed():
            run.status, run.error = "failed", what.error
        case events.Ended():
            run.status, run.error = "ok", ""
            run.wire_bytes, run.inside_bytes = what.wire_bytes, what.inside_bytes
            run.logical_bytes, run.nic_bytes = what.logical_bytes, what.nic_bytes
            run.processor, run.busy_cores = what.processor, what.busy_cores
            run.beside, run.late = what.beside, what.late
        case _:
            pass
