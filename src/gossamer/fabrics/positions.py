"""Where each rank stands, in words: to compare before a collective, and to explain a failure after it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Claim,
    Closed,
    Compute,
    Join,
    Receive,
    Send,
    Verb,
)


class Position(NamedTuple):
    """One rank's place in one lane. Two ranks agree if all is equal, and each expects what the other sends it."""

    step: int
    label: str
    request: int  # how many collectives this lane has done before
    verb: str
    sends: Sequence[int] = ()
    expects: Sequence[int] = ()
    trouble: str = ""

    def __str__(self) -> str:
        trouble = f" ({self.trouble})" if self.trouble else ""
        return f"step {self.step}, {self.label or 'unlabelled'!r}, {self.verb}, collective {self.request}{trouble}"

    def write(self) -> str:
        return json.dumps(self)

    @staticmethod
    def read(text: str) -> "Position":
        return Position(*json.loads(text))

    def agrees(self, mine: int, other: "Position", theirs: int) -> bool:
        """Whether rank `mine` here and rank `theirs` there are about to do the same thing."""
        if self[:4] != other[:4] or len(self.sends) != len(other.sends):
            return False
        if not self.sends:
            return True
        return self.sends[theirs] == other.expects[mine] and self.expects[theirs] == other.sends[mine]


def position(step: int, label: str, request: int, verb: Verb | None) -> Position:
    sends = [w.numel() for w in verb.wires] if isinstance(verb, AllToAll) else ()
    expects = list(verb.lengths) if isinstance(verb, AllToAll) else ()
    return Position(step, label, request, _describe(verb), sends, expects)


def _describe(verb: Verb | None) -> str:
    match verb:
        case AllReduce(tensor, op):
            return f"AllReduce {op} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        case AllGather(wire):
            return f"AllGather of {wire.numel()} bytes"
        case Send(to, wire):
            return f"Send of {wire.numel()} bytes to rank {to}"
        case Receive(source, length):
            return f"Receive of {length} bytes from rank {source}"
        case Claim(name):
            return f"Claim of {name!r}"
        case Closed(name, count):
            return f"Closed {name!r} at {count}"
        case Compute(_, label):
            return f"Compute {label!r}"
        case Join():
            return "Join"
        case None:
            return "between requests"
        case _:
            return type(verb).__name__


def explain(rank: int, size: int, mine: Position, others: Mapping[int, Position], left: Collection[int] = ()) -> str:
    """Say who is missing, who has left, and who is where."""
    lines = list[str]()
    missing = [r for r in range(size) if r != rank and r not in others and r not in left]
    if missing:
        lines.append(f"No word from {_ranks(missing)}: dead, frozen, cut off, or not here yet.")
    gone = [r for r in left if r not in others]
    if gone:
        has = "has" if len(gone) == 1 else "have"
        lines.append(f"{_ranks(gone).capitalize()} {has} detached or ended: do all ranks take equally many steps?")
    for other, position in sorted(others.items()):
        same = mine.agrees(rank, position, other) and not position.trouble
        lines.append(f"Rank {other} is at {'the same place' if same else position}.")
    return " ".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
