"""The ledger: every request that crossed the network, with its bytes and seconds."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, Send, Verb


@dataclass(frozen=True)
class Entry:
    """One request. `handed` is what was given to the backend, `sent` and `received` what crosses this rank's link."""

    step: int
    rank: int
    verb: str
    label: str
    handed: int
    sent: int
    received: int
    seconds: float


class Ledger:
    """All entries of one rank, or of all ranks of a simulation; totals are kept even when entries are dropped."""

    def __init__(self, keep: int = 100_000) -> None:
        self.keep = keep
        self.entries = list[Entry]()
        self.handed = self.sent = self.received = self.requests = 0
        self.seconds = 0.0
        self.exposed_seconds = 0.0  # time that the training loop stood still for the network
        self._verbs = dict[str, tuple[int, int]]()
        self.busy_seconds = 0.0  # processor time of programs between their requests: encoding and decoding

    def note(self, entry: Entry) -> int:
        """Returns the entry's place."""
        self.requests += 1
        self.handed += entry.handed
        self.sent += entry.sent
        self.received += entry.received
        self.seconds += entry.seconds
        count, sent = self._verbs.get(entry.verb, (0, 0))
        self._verbs[entry.verb] = count + 1, sent + entry.sent
        if len(self.entries) < self.keep:
            self.entries.append(entry)
        return self.requests - 1

    def amend(self, place: int, seconds: float) -> None:
        """How long a request took that was noted before it was over."""
        self.seconds += seconds
        if place < len(self.entries):
            self.entries[place] = replace(self.entries[place], seconds=seconds)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def write(self, path: Path) -> None:
        """One JSON object per line."""
        path.write_text("".join(json.dumps(asdict(e)) + "\n" for e in self.entries))

    @staticmethod
    def read(path: Path) -> "Ledger":
        ledger = Ledger()
        for line in path.read_text().splitlines():
            ledger.note(Entry(**json.loads(line)))
        return ledger

    def by_verb(self) -> dict[str, tuple[int, int]]:
        """Requests and bytes sent, by verb."""
        return dict(self._verbs)


Traffic = tuple[int, int, int]


def traffic(verb: Verb, rank: int, size: int) -> Traffic:
    """Bytes handed to the backend, sent over this rank's link, and received over it.

    All-reduce and all-gather are counted as rings: 2 (N-1)/N of the tensor, and N-1 wires, each way.
    """
    match verb:
        case AllReduce(tensor):
            n = tensor.numel() * tensor.element_size()
            crossed = 2 * (size - 1) * n // size
            return n, crossed, crossed
        case AllGather(wire):
            return wire.numel(), (size - 1) * wire.numel(), (size - 1) * wire.numel()
        case AllToAll(wires, lengths):
            sent = sum(w.numel() for j, w in enumerate(wires) if j != rank)
            return sent, sent, sum(n for j, n in enumerate(lengths) if j != rank)
        case Send(_, wire):
            return wire.numel(), wire.numel(), 0
        case Receive(_, length):
            return 0, 0, length
        case _:
            return 0, 0, 0
