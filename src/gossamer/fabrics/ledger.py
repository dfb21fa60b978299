"""The ledger: every request that crossed the network, with its bytes and seconds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gossamer.core.events import Age, Decision, Drop, Event, Presence
from gossamer.core.verbs import Among


@dataclass(frozen=True)
class LedgerEntry:
    """One request: `handed` bytes went to the backend, `sent` and `received` bytes cross this rank's link.

    `inside` is the part of `sent` that stays within the node; `among` lists the ranks that took part, if not all.
    """

    step: int
    rank: int
    verb: str
    label: str
    handed: int
    sent: int
    received: int
    seconds: float
    inside: int = 0
    among: Among = None


EVENTS: dict[str, type[Event]] = {"decision": Decision, "dropped": Drop, "age": Age, "lost": Presence}  # by a field


class Ledger:
    """The entries of one rank, or of all ranks of a simulation; totals count also the entries beyond `keep`.

    `per_node` ranks share a node and its network card; ranks are numbered node by node.
    """

    def __init__(self, keep: int = 100_000, per_node: int = 1) -> None:
        self.keep, self.per_node = keep, per_node
        self.entries = list[LedgerEntry]()
        self.decisions = list[Decision]()
        self.drops = list[Drop]()
        self.ages = list[Age]()
        self.presences = list[Presence]()
        self._events: dict[type[Event], list[Any]] = {
            Decision: self.decisions,
            Drop: self.drops,
            Age: self.ages,
            Presence: self.presences,
        }
        self.handed = self.sent = self.received = self.requests = 0
        self.inside = 0  # of what was sent
        self.seconds = 0.0
        self.exposed_seconds = 0.0  # time that the training loop waited for the network
        self._verbs = dict[str, tuple[int, int]]()
        self.busy_seconds = 0.0  # processor time of programs between their requests: encoding and decoding

    def note(self, entry: LedgerEntry) -> int:
        """Add an entry and return its index."""
        self.requests += 1
        self.handed += entry.handed
        self.sent += entry.sent
        self.received += entry.received
        self.inside += entry.inside
        self.seconds += entry.seconds
        count, sent = self._verbs.get(entry.verb, (0, 0))
        self._verbs[entry.verb] = count + 1, sent + entry.sent
        if len(self.entries) < self.keep:
            self.entries.append(entry)
        return self.requests - 1

    def hear(self, event: Event) -> None:
        """Add an event of the run."""
        kept: list[Any] = self._events[type(event)]
        if len(kept) < self.keep:
            kept.append(event)

    def amend(self, place: int, seconds: float) -> None:
        """Set the seconds of a request that was noted before it ended."""
        self.seconds += seconds
        if place < len(self.entries):
            self.entries[place] = replace(self.entries[place], seconds=seconds)

    @property
    def between(self) -> int:
        """Bytes sent from node to node."""
        return self.sent - self.inside

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)

    def write(self, path: Path | str) -> None:
        """Write one JSON object per line: entries first, then decisions, drops, ages and presences."""
        records = (*self.entries, *self.decisions, *self.drops, *self.ages, *self.presences)
        lines = [json.dumps(asdict(line), default=str) + "\n" for line in records]
        Path(path).write_text("".join(lines))

    @staticmethod
    def read(path: Path | str) -> "Ledger":
        ledger = Ledger()
        for line in Path(path).read_text().splitlines():
            record = json.loads(line)
            if (kind := next((EVENTS[key] for key in EVENTS if key in record), None)) is not None:
                ledger.hear(kind(**record))
                continue
            among = record.pop("among", None)
            ledger.note(LedgerEntry(**record, among=None if among is None else tuple(among)))
        return ledger

    def by_verb(self) -> dict[str, tuple[int, int]]:
        """Requests and bytes sent, by verb."""
        return dict(self._verbs)
