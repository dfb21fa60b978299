"""The ledger: every request that crossed the network, with its bytes and seconds."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.core.groups import members, place
from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Among, Receive, Send, Shared, Verb


@dataclass(frozen=True)
class LedgerEntry:
    """One request. `handed` is what was given to the backend, `sent` and `received` what crosses this rank's link.

    `inside` is how much of `sent` stays within the node; `among` says which ranks took part, if not all.
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


@dataclass(frozen=True)
class Decision:
    """What a controller put in force from this step on, in words."""

    step: int
    rank: int
    decision: str


@dataclass(frozen=True)
class Drop:
    """A gradient that came too late for its step, and the samples it was of, as far as the training loop has said."""

    step: int
    rank: int
    dropped: list[Any]


@dataclass(frozen=True)
class Age:
    """A model has landed that answers this rank's own of so many steps ago."""

    step: int
    rank: int
    age: int


@dataclass(frozen=True)
class Presence:
    """From this step on ranks are missing that were there, or are there that were missing."""

    step: int
    rank: int
    lost: list[int]
    back: list[int]


class Ledger:
    """All entries of one rank, or of all ranks of a simulation; totals are kept even when entries are dropped.

    `per_node` ranks share a node, and its network card; they are numbered node by node.
    """

    def __init__(self, keep: int = 100_000, per_node: int = 1) -> None:
        self.keep, self.per_node = keep, per_node
        self.entries = list[LedgerEntry]()
        self.decisions = list[Decision]()
        self.drops = list[Drop]()
        self.ages = list[Age]()
        self.presences = list[Presence]()
        self.handed = self.sent = self.received = self.requests = 0
        self.inside = 0  # of what was sent
        self.seconds = 0.0
        self.exposed_seconds = 0.0  # time that the training loop stood still for the network
        self._verbs = dict[str, tuple[int, int]]()
        self.busy_seconds = 0.0  # processor time of programs between their requests: encoding and decoding

    def note(self, entry: LedgerEntry) -> int:
        """Returns the entry's place."""
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

    def decide(self, step: int, rank: int, decision: str) -> None:
        """From this step on requests are those of another recipe."""
        if len(self.decisions) < self.keep:
            self.decisions.append(Decision(step, rank, decision))

    def drop(self, step: int, rank: int, samples: Sequence[Any]) -> None:
        """This rank's gradient of a step was not used."""
        if len(self.drops) < self.keep:
            self.drops.append(Drop(step, rank, [*samples]))

    def age(self, step: int, rank: int, age: int) -> None:
        """What landed at this step is so many steps old."""
        if len(self.ages) < self.keep:
            self.ages.append(Age(step, rank, age))

    def presence(self, step: int, rank: int, lost: Sequence[int], back: Sequence[int]) -> None:
        """Some ranks are lost, or have come back."""
        if len(self.presences) < self.keep:
            self.presences.append(Presence(step, rank, [*lost], [*back]))

    def amend(self, place: int, seconds: float) -> None:
        """How long a request took that was noted before it was over."""
        self.seconds += seconds
        if place < len(self.entries):
            self.entries[place] = replace(self.entries[place], seconds=seconds)

    @property
    def between(self) -> int:
        """Bytes sent from node to node."""
        return self.sent - self.inside

    def __iter__(self) -> Iterator[LedgerEntry]:
        return iter(self.entries)

    def write(self, path: Path) -> None:
        """One JSON object per line; decisions, drops, ages and who was lost or came back stand last."""
        told = (*self.entries, *self.decisions, *self.drops, *self.ages, *self.presences)
        lines = [json.dumps(asdict(line), default=str) + "\n" for line in told]
        path.write_text("".join(lines))

    @staticmethod
    def read(path: Path) -> "Ledger":
        ledger = Ledger()
        for line in path.read_text().splitlines():
            said = json.loads(line)
            if "decision" in said:
                ledger.decide(**said)
                continue
            if "dropped" in said:
                ledger.drop(said["step"], said["rank"], said["dropped"])
                continue
            if "age" in said:
                ledger.age(**said)
                continue
            if "lost" in said:
                ledger.presence(**said)
                continue
            among = said.pop("among", None)
            ledger.note(LedgerEntry(**said, among=None if among is None else tuple(among)))
        return ledger

    def by_verb(self) -> dict[str, tuple[int, int]]:
        """Requests and bytes sent, by verb."""
        return dict(self._verbs)


class Traffic(NamedTuple):
    """Bytes handed to the backend, sent over this rank's link, and received over it; and how many of those sent stay inside."""

    handed: int
    sent: int
    received: int
    inside: int = 0


def traffic(verb: Verb, rank: int, size: int, per_node: int = 1) -> Traffic:
    """What a request of this rank moves, in a world of this size with so many ranks a node.

    All-reduce and all-gather are counted as rings: 2 (N-1)/N of the tensor, and N-1 wires, each way. Those go to the next
    rank of the group, and so leave the node where it is another node's.
    """
    if not isinstance(verb, Shared):
        return Traffic(0, 0, 0)
    everyone, (index, count) = members(verb, size), place(verb, rank, size)
    mine = rank // per_node

    def stays(to: int) -> bool:
        return everyone[to] // per_node == mine

    match verb:
        case AllReduce(tensor):
            n = tensor.numel() * tensor.element_size()
            return _ring(n, 2 * (count - 1) * n // count, stays((index + 1) % count))
        case AllGather(wire):
            return _ring(wire.numel(), (count - 1) * wire.numel(), stays((index + 1) % count))
        case AllToAll(wires, lengths):
            sent = {j: w.numel() for j, w in enumerate(wires) if j != index}
            inside = sum(n for j, n in sent.items() if stays(j))
            came = sum(n for j, n in enumerate(lengths) if j != index)
            return Traffic(sum(sent.values()), sum(sent.values()), came, inside)
        case Send(to, wire):
            n = wire.numel()
            return Traffic(n, n, 0, n if stays(to) else 0)
        case Receive(_, length):
            return Traffic(0, 0, length)
        case _:
            return Traffic(0, 0, 0)


def _ring(handed: int, crossed: int, stays: bool) -> Traffic:
    return Traffic(handed, crossed, crossed, crossed if stays else 0)
