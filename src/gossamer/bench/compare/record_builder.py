"""Build the record of a comparison from the events of its ranks; it is valid at any moment."""

import json
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.bench.compare.journal import Journal
from gossamer.bench.compare.plan import MARK
from gossamer.bench.lab import name_rank
from gossamer.bench.record import Evaluation, Record, Run, Step
from gossamer.core.errors import GossamerError

OnEvent = Callable[[dict[str, Any]], None]
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
        said, mark, rest = text.partition(MARK)  # the line of another rank may be unfinished
        if mark:
            try:
                event = json.loads(rest)
                self._understand(event)
            except (ValueError, KeyError, TypeError, AttributeError):  # cut short by a kill, or not an event
                said = text
            else:
                self._tell(event)
        if said.strip():
            self.complaints.append(said if number is None else f"[{self._who(number)}] {said}")

    def say(self, text: str) -> None:
        self.on_event({"event": "note", "text": text})

    def unshaped(self, reason: str) -> None:
        self.record.note, self.record.rate = f"unshaped: {reason}", "unshaped"
        self.say(
            f"no lab here, so the network is as fast as this machine, and times say little about a slow network: {reason}"
        )

    def ended(self, number: int, code: int) -> None:
        """Note the rank that failed first, if a signal ended it: it cannot report that itself."""
        if code < 0 or code > 128:
            name = signal.Signals(-code if code < 0 else code - 128).name
            how = "frozen" if name == "SIGSTOP" else "killed"
            hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
            self.lost = f"{name_rank(number, self.record.per_host)} was {how} by {name}{hint}"

    def _who(self, number: int) -> str:
        return str(number) if self.record.per_host == 1 else name_rank(number, self.record.per_host)

    def take(self, event: dict[str, Any]) -> None:
        """Take one event of a rank that runs in this process."""
        self._understand(event)
        self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        if event["event"] != "history":  # its events were shown when they happened
            self.on_event(event)
        if why := self.journal.keep_up():
            self.say(f"the record cannot be written: {why}; it is tried again until the end")

    def _understand(self, event: dict[str, Any]) -> None:
        """Add an event to the record; raises an error if it is not an event of ours."""
        kind, run = event["event"], self.record.run(event.get("run", ""))
        facts = {k: v for k, v in event.items() if k not in ("event", "run")}
        if kind == "broken":
            self.broken = str(facts["error"])
        elif run is not None:
            _note(run, kind, facts)
            if kind in ("end", "failed"):
                self.finished.add(run.name)
        elif "run" in event:
            raise ValueError(f"no run is called {event['run']!r}")

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


def _note(run: Run, kind: str, facts: dict[str, Any]) -> None:
    if kind == "contender":
        run.recipe = facts["recipe"]
    elif kind == "history":  # events of a resumed run from before its checkpoint
        for name, earlier in facts["events"]:
            _note(run, name, earlier)
    elif kind == "step":
        run.steps.append(Step(**facts))
    elif kind == "evaluation":
        run.evaluations.append(Evaluation(**facts))
    elif kind == "residual":
        run.residuals.append((facts["step"], facts["norm"]))
    elif kind == "decision":
        run.decisions.append((facts["step"], facts["text"]))
    elif kind == "spoilt":
        run.skipped_steps, run.dropped_rounds = facts["skipped_steps"], facts["dropped_rounds"]
        run.spoilt = facts["by"]
    elif kind == "staleness":
        run.staleness = facts["ages"]
    elif kind == "failed":
        run.status, run.error = "failed", facts["error"]
    elif kind == "layers":
        run.layer_errors |= facts["errors"]
    elif kind == "end":
        run.status, run.error = "ok", ""
        run.wire_bytes, run.inside_bytes = facts["wire_bytes"], facts["inside_bytes"]
        run.logical_bytes, run.nic_bytes = facts["logical_bytes"], facts["nic_bytes"]
        run.processor, run.busy_cores = facts.get("processor"), facts.get("busy_cores")
        run.beside, run.late = facts.get("beside"), facts.get("late")
