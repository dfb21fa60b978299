"""Describes the position of each rank, to compare ranks before a collective and to explain a failure."""

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from gossamer.core.errors import PeerError
from gossamer.core.groups import named
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Join,
    Receive,
    Send,
    Shared,
    TakeTicket,
    Verb,
    WaitQuorum,
)
from gossamer.fabrics.liveness.heartbeat import rank_statuses, ranks
from gossamer.fabrics.liveness.store import SharedStore, poll, why_silent


class CollectiveFingerprint(NamedTuple):
    """One rank's position on one comm thread. Two agree if all fields are equal, and each expects what the other sends."""

    step: int
    label: str
    request: int  # number of collectives on this comm thread and group so far
    verb: str
    sends: Sequence[int] = ()
    expects: Sequence[int] = ()
    trouble: str = ""
    among: Sequence[int] = ()  # the group's ranks; empty for all ranks
    by_itself: bool = False  # requested by the training loop, so that steps may differ

    def __str__(self) -> str:
        trouble = f" ({self.trouble})" if self.trouble else ""
        return f"step {self.step}, {self.label or 'unlabelled'!r}, {self.verb}, collective {self.request}{trouble}"

    def write(self) -> str:
        return json.dumps(self)

    @staticmethod
    def of(fields: Any, size: int) -> "CollectiveFingerprint | None":
        """A position as one of `size` ranks has written it; None for anything else."""
        step, label, request, verb, sends, expects, trouble, among, by_itself = fields
        fits = all(isinstance(n, int) for n in (step, request, *sends, *expects, *among))
        fits = fits and all(isinstance(word, str) for word in (label, verb, trouble))
        fits = fits and isinstance(by_itself, bool)
        fits = fits and len(sends) == len(expects) in (0, len(among) or size)
        found = CollectiveFingerprint(step, label, request, verb, sends, expects, trouble, tuple(among), by_itself)
        return found if fits else None

    def agrees(self, mine: int, other: "CollectiveFingerprint", theirs: int) -> bool:
        """Whether the place `mine` of a group here and the place `theirs` there are about to do the same thing."""
        if not self.meets(other):
            return False
        if not self.sends:
            return True
        return self.sends[theirs] == other.expects[mine] and self.expects[theirs] == other.sends[mine]

    def meets(self, other: "CollectiveFingerprint") -> bool:
        """True if both are about to make the same request of the same ranks, sizes apart."""
        # The label of a training loop's request is not compared: when members meet, one rank attaches and another trains.
        first = 2 if self.by_itself else 1
        here, there = (*self[first:4], tuple(self.among)), (*other[first:4], tuple(other.among))
        if here != there or self.by_itself != other.by_itself or len(self.sends) != len(other.sends):
            return False
        return self.by_itself or self.step == other.step

    def place_of(self, rank: int) -> int:
        """Index of a rank in the group."""
        return list(self.among).index(rank) if rank in self.among else rank


def read_all(store: SharedStore, key: str, posts: Mapping[int, str]) -> dict[int, CollectiveFingerprint]:
    """Parse the positions that the ranks have posted, by rank."""
    read = partial(CollectiveFingerprint.of, size=store.size)
    return {rank: store.parsed(f"{key}/{rank}", text, read) for rank, text in posts.items()}


def position(step: int, label: str, request: int, verb: Verb | None, by_itself: bool = False) -> CollectiveFingerprint:
    sends = [w.numel() for w in verb.wires] if isinstance(verb, AllToAll) else ()
    expects = list(verb.lengths) if isinstance(verb, AllToAll) else ()
    among = verb.among if isinstance(verb, Shared) else None
    words = _describe(verb) + named(among)
    return CollectiveFingerprint(step, label, request, words, sends, expects, among=among or (), by_itself=by_itself)


def _describe(verb: Verb | None) -> str:
    match verb:
        case AllReduce(tensor, op):
            return f"AllReduce {op} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
        case AllGather(wire):
            return f"AllGather of {wire.numel()} bytes"
        case Send(to, wire):
            return f"Send of {wire.numel()} bytes to rank {_global(verb, to)}"
        case Receive(None, length):
            return f"Receive of {length} bytes from any rank"
        case Receive(source, length):
            return f"Receive of {length} bytes from rank {_global(verb, source)}"
        case TakeTicket(name):
            return f"TakeTicket {name!r}"
        case WaitQuorum(name, count):
            return f"WaitQuorum {name!r} of {count}"
        case Compute(_, label):
            return f"Compute {label!r}"
        case Join():
            return "Join"
        case None:
            return "between requests"
        case _:
            return type(verb).__name__


def _global(verb: Send | Receive, rank: int | None) -> int | None:
    """The global rank of a group's rank."""
    known = verb.among is not None and rank is not None and rank < len(verb.among)
    return verb.among[rank] if known else rank  # pyright: ignore[reportOptionalSubscript, reportArgumentType, reportCallIssue]


def explain(
    rank: int,
    size: int,
    mine: CollectiveFingerprint,
    others: Mapping[int, CollectiveFingerprint],
    left: Collection[int] = (),
    alive: Collection[int] = (),
) -> str:
    """Describe which ranks are missing, have left or are busy, and the position of each other rank."""
    lines = list[str]()
    silent = [r for r in range(size) if r != rank and r not in others and r not in left]
    if missing := [r for r in silent if r not in alive]:
        logs = "the end of its log, and whether its machine answers"
        if len(missing) > 1:
            logs = "the ends of their logs, and whether their machines answer"
        lines.append(
            f"No answer from {ranks(missing)}: dead, frozen, cut off, or not started yet. Check {logs}; then start all ranks "
            "again from a checkpoint. If a rank was only slow, give more time: attach(deadline=...)."
        )
    if busy := [r for r in silent if r in alive]:
        are = "is" if len(busy) == 1 else "are"
        lines.append(f"{ranks(busy).capitalize()} {are} alive, and busy elsewhere.")
    if gone := [r for r in left if r not in others]:
        has = "has" if len(gone) == 1 else "have"
        lines.append(
            f"{ranks(gone).capitalize()} {has} detached or ended: check that all ranks take equally many steps."
        )
    for other, position in sorted(others.items()):
        same = mine.agrees(mine.place_of(rank), position, mine.place_of(other)) and not position.trouble
        lines.append(
            f"Rank {other} is at {'the same position' if same else position}.{_differing(rank, mine, other, position)}"
        )
    return " ".join(lines)


def _differing(rank: int, mine: CollectiveFingerprint, other: int, theirs: CollectiveFingerprint) -> str:
    """The sizes on which two ranks of one all-to-all disagree, in words."""
    if not mine.sends or not mine.meets(theirs):
        return ""
    here, there = mine.place_of(rank), mine.place_of(other)
    pairs = (
        (rank, mine.sends[there], other, theirs.expects[here]),
        (other, theirs.sends[here], rank, mine.expects[there]),
    )
    return "".join(
        f" Rank {a} sends {sent} bytes to rank {b}, which expects {expected}."
        for a, sent, b, expected in pairs
        if sent != expected
    )


PATIENCE = 1.0  # seconds that a failed rank gives the others to report their position


class FailureReport:
    """Asks the other ranks, after a failure, for their position, and whether they have left or are alive."""

    def __init__(self, store: SharedStore, mine: CollectiveFingerprint, patience: float = PATIENCE) -> None:
        self._store, self.mine, self._patience = store, mine, patience
        self._found = dict[int, CollectiveFingerprint]()
        self._left, self._alive = list[int](), list[int]()
        self._done = self._refused = False
        self._wrong: PeerError | None = None

    def ask(self) -> None:
        try:
            self._store.raise_flag("broken", self.mine.trouble)
            before = rank_statuses(self._store)
            self._found = self._positions()
            after = rank_statuses(self._store)
            self._left = [r for r, word in after.items() if word.state == "left"]
            self._alive = [r for r, word in after.items() if r in before and before[r] != word]
            self._done = True
        except PeerError as wrong:
            self._wrong = wrong
        except RuntimeError:
            self._refused = True

    def _positions(self) -> dict[int, CollectiveFingerprint]:
        def wait(ready: Callable[[], bool]) -> None:
            poll(ready, self._patience, threading.Event())

        posts = self._store.meet("end", self.mine.write(), wait)
        return read_all(self._store, "end", posts)

    def answer(self, slow: bool) -> str:
        """The findings so far, in words; `slow` means that the store has answered not long ago."""
        if self._wrong is not None:
            return str(self._wrong)
        if self._done:
            return explain(self._store.rank, self._store.size, self.mine, self._found, self._left, self._alive)
        if slow and not self._refused:
            return (
                "The store answers too slowly to report the positions of the other ranks. Check whether its host (usually rank 0) "
                "or the network is overloaded, or give more time: attach(deadline=...)."
            )
        return f"The store does not answer: {why_silent(self._store.raw)}."
