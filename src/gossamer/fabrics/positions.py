"""Where each rank stands, in words: to compare before a collective, and to explain a failure after it."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

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
from gossamer.fabrics.board import Board
from gossamer.fabrics.pulse import ranks


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
    def read(board: Board, key: str, text: str) -> "Position":
        try:
            said: Any = json.loads(text)
            step, label, request, verb, sends, expects, trouble = said
            fits = all(isinstance(n, int) for n in (step, request, *sends, *expects))
            fits = fits and all(isinstance(word, str) for word in (label, verb, trouble))
            fits = fits and len(sends) == len(expects) in (0, board.size)
        except (ValueError, TypeError, RecursionError):
            raise board.malformed(key, text) from None
        if not fits:
            raise board.malformed(key, text)
        return Position(step, label, request, verb, sends, expects, trouble)

    def agrees(self, mine: int, other: "Position", theirs: int) -> bool:
        """Whether rank `mine` here and rank `theirs` there are about to do the same thing."""
        if self[:4] != other[:4] or len(self.sends) != len(other.sends):
            return False
        if not self.sends:
            return True
        return self.sends[theirs] == other.expects[mine] and self.expects[theirs] == other.sends[mine]


def read_all(board: Board, key: str, posts: Mapping[int, str]) -> dict[int, Position]:
    """The positions that were posted at a meeting, by rank."""
    return {rank: Position.read(board, f"{key}/{rank}", text) for rank, text in posts.items()}


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


def explain(
    rank: int,
    size: int,
    mine: Position,
    others: Mapping[int, Position],
    left: Collection[int] = (),
    alive: Collection[int] = (),
) -> str:
    """Say who is missing, who has left, who is busy, and who is where."""
    lines = list[str]()
    silent = [r for r in range(size) if r != rank and r not in others and r not in left]
    if missing := [r for r in silent if r not in alive]:
        lines.append(f"No word from {ranks(missing)}: dead, frozen, cut off, or not here yet.")
    if busy := [r for r in silent if r in alive]:
        lines.append(f"{ranks(busy).capitalize()} {_is(busy)} alive, and at work elsewhere.")
    if gone := [r for r in left if r not in others]:
        has = "has" if len(gone) == 1 else "have"
        lines.append(f"{ranks(gone).capitalize()} {has} detached or ended: do all ranks take equally many steps?")
    for other, position in sorted(others.items()):
        same = mine.agrees(rank, position, other) and not position.trouble
        lines.append(
            f"Rank {other} is at {'the same place' if same else position}.{_differing(rank, mine, other, position)}"
        )
    return " ".join(lines)


def _is(numbers: list[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _differing(rank: int, mine: Position, other: int, theirs: Position) -> str:
    """What two ranks of one all-to-all see differently."""
    if mine[:4] != theirs[:4] or not mine.sends or len(mine.sends) != len(theirs.sends):
        return ""
    pairs = (
        (rank, mine.sends[other], other, theirs.expects[rank]),
        (other, theirs.sends[rank], rank, mine.expects[other]),
    )
    return "".join(
        f" Rank {a} sends {sent} bytes to rank {b}, which expects {expected}."
        for a, sent, b, expected in pairs
        if sent != expected
    )
