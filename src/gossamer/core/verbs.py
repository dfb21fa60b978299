"""Requests that an algorithm can make of the network.

An algorithm is a generator. It yields one of the requests below and is sent the answer; it does not depend on the
fabric that answers. The functions at the end are the typed form for authors: `mean = yield from all_reduce(x)`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossamer.core.errors import PeerError, WireError
from gossamer.core.wire import GatheredWires, LazyWire, LazyWires, Read

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]
Among = tuple[int, ...] | None
"""The ranks that take part in a request; None for all. Ranks in the request and in its answer are numbered in the group:
0 is its first. All of a group make the same requests in the same order; see `core.groups` for whole programs.
"""


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Reduce a tensor over all ranks; the given tensor may be overwritten."""

    tensor: Tensor
    op: ReduceOp = "sum"
    among: Among = None


@dataclass(frozen=True, eq=False)
class AllGather:
    """Gather every rank's wire in rank order; all wires have the same length.

    With `read`, nothing is answered: read(j, wire) is called as the wires come, in the order of `receive_order`, each while the
    next one travels. `agreed` says that the ranks have just agreed on the length, so that a new length is no error.
    """

    wire: Tensor
    read: Read | None = None
    agreed: bool = False
    among: Among = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send one wire (or LazyWire) to each rank and receive one from each; `lengths[j]` bytes come from rank j.

    Lazy wires are made for the own rank, the next one, the one after that, and so on. `read` is as in an all-gather.
    `make_all`, if given, makes all wires at once, with the same bits, for a fabric on which nothing travels meanwhile.
    """

    wires: Sequence[Tensor | LazyWire]
    lengths: Sequence[int]
    read: Read | None = None
    among: Among = None
    make_all: Callable[[], Sequence[Tensor]] | None = None

    @property
    def sent(self) -> Sequence[int]:
        """The length of the wire to each rank."""
        return self.wires.lengths if isinstance(self.wires, LazyWires) else [wire.numel() for wire in self.wires]


@dataclass(frozen=True, eq=False)
class Send:
    """Send a wire to one rank without waiting; the wire must not be written to afterwards.

    `awaits` are the (rank, length) pairs that this program will receive next. A backend that knows of them before the wire
    leaves can carry both directions of a link at once.
    """

    to: int
    wire: Tensor
    awaits: Sequence[tuple[int, int]] = ()
    among: Among = None


@dataclass(frozen=True, eq=False)
class Receive:
    """Wait for the next wire of `length` bytes from one rank, or from the first rank to send if the source is None.

    Then the answer is the rank and its wire. Which rank is first depends on timing, so the result must not rely on it.
    """

    source: int | None
    length: int
    among: Among = None


@dataclass(frozen=True)
class TakeTicket:
    """Take the next ticket of a counter that all ranks share; the first ticket is 1."""

    name: str
    among: Among = None


@dataclass(frozen=True)
class WaitQuorum:
    """Wait until `count` tickets are taken; the answer is the ranks that took them, in order: `TicketHolders`.

    `fallback` holds (seconds, tickets): that long after the request, so many are enough, and the first rank to see that closes the
    counter for all, with as many as are taken by then.
    """

    name: str
    count: int
    among: Among = None
    fallback: tuple[tuple[float, int], ...] = ()


class TicketHolders(tuple[int, ...]):
    """The ranks that took tickets, in order, and how long after the request each was seen."""

    seconds: tuple[float, ...] = ()

    @staticmethod
    def seen(ranks: Sequence[int], seconds: Sequence[float]) -> "TicketHolders":
        out = TicketHolders(ranks)
        out.seconds = tuple(seconds)
        return out


@dataclass(frozen=True, eq=False)
class Compute:
    """Do local work that takes `seconds` on a virtual clock."""

    work: Callable[[], Any]
    label: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Now:
    """Read the clock, in seconds since an arbitrary start; the virtual clock in a simulation."""


class Handle(Generic[T]):
    """A running program; join it to get its result."""

    def done(self) -> bool:
        raise NotImplementedError

    def failed(self) -> bool:
        """True if the program ended with an error, which joining it raises."""
        return False

    def overdue(self) -> bool:
        """True if the program takes longer than the deadline, for callers that never wait for it."""
        return False


@dataclass(frozen=True, eq=False)
class Start:
    """Start a program on a comm thread, which runs its programs one after the other, in the order of starting."""

    program: "Program[Any]"
    label: str = ""
    step: int = 0
    lane: str = "comm"


@dataclass(frozen=True, eq=False)
class Join:
    """Wait for a started program and get its result."""

    handle: Handle[Any]


@dataclass(frozen=True, eq=False)
class LateUpdate:
    """The agreed gradient of a step (None if no rank applies it) and the rate of each parameter group."""

    gradient: Tensor | None
    rates: Sequence[float]


@dataclass(frozen=True)
class OptimizerStep:
    """Let the optimizer step now. The answer is False where the user's scaler skipped the step.

    With `missed`, apply the update of a step that ended without this rank instead; that is no step of this rank's own.
    """

    missed: LateUpdate | None = None


@dataclass(frozen=True, eq=False)
class Regroup:
    """Continue after a failure with the ranks that are present: lost ranks are left out, returned ranks are admitted.

    The answer is `Present`. Where no rank may be lost, or it does not help, the failure is raised.
    """

    failure: Exception


class MembersChanged(PeerError):
    """Ranks were lost or have come. Those that are present have met again; only what was under way is lost."""


class MembersLeave(PeerError):
    """Ranks leave in good order: all meet again without those in `ranks`; if it is empty, with all, who then hear of it."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class Present(NamedTuple):
    """The ranks that are present: this rank's index among them, their numbers, and the incarnation of each.

    `joins` is true if this rank joined while others were training. `weights` are those that they were attached with, if these
    differ.
    """

    place: int
    ranks: tuple[int, ...]
    lives: tuple[int, ...]
    joins: bool = False
    weights: tuple[float, ...] = ()

    @staticmethod
    def all_of(rank: int, size: int) -> "Present":
        """All ranks, where none may be lost."""
        return Present(rank, tuple(range(size)), (0,) * size)

    @property
    def may_change(self) -> bool:
        """True if ranks may be lost or come, also while this one is alone."""
        return any(self.lives)

    @property
    def life(self) -> int:
        """This rank's incarnation; a new one after it was declared lost."""
        return self.lives[self.place]

    def without(self, others: "Present") -> list[int]:
        """The ranks that are not among `others`, or have another incarnation there."""
        there = {*zip(others.ranks, others.lives)}
        return [rank for rank, life in zip(self.ranks, self.lives) if (rank, life) not in there]


# Requests that several ranks take part in.
Shared = AllReduce | AllGather | AllToAll | Send | Receive | TakeTicket | WaitQuorum
Verb = Shared | Compute | Now | Start | Join | OptimizerStep | Regroup
Program = Generator[Verb, Any, T]


def all_reduce(tensor: Tensor, op: ReduceOp = "sum", among: Among = None) -> Program[Tensor]:
    return (yield AllReduce(tensor, op, among))


def all_gather(wire: Tensor, among: Among = None) -> Program[list[Tensor]]:
    return (yield AllGather(wire, among=among))


def all_to_all(
    wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], among: Among = None
) -> Program[list[Tensor]]:
    return (yield AllToAll(wires, lengths, among=among))


def read_all_gather(wire: Tensor, read: Read) -> Program[None]:
    """All-gather, reading each wire while the next one travels."""
    yield AllGather(wire, read)


def read_all_to_all(
    wires: Sequence[Tensor | LazyWire],
    lengths: Sequence[int],
    read: Read,
    make_all: Callable[[], Sequence[Tensor]] | None = None,
) -> Program[None]:
    """All-to-all, making each wire while the one before it travels, and reading each while the next one does."""
    yield AllToAll(wires, lengths, read, make_all=make_all)


def send(to: int, wire: Tensor, awaits: Sequence[tuple[int, int]] = ()) -> Program[None]:
    yield Send(to, wire, awaits)


def receive(source: int, length: int) -> Program[Tensor]:
    return (yield Receive(source, length))


def receive_first(length: int) -> Program[tuple[int, Tensor]]:
    """Receive the first wire to arrive from any rank; returns the rank and the wire."""
    return (yield Receive(None, length))


def take_ticket(name: str) -> Program[int]:
    return (yield TakeTicket(name))


def wait_quorum(name: str, count: int, fallback: tuple[tuple[float, int], ...] = ()) -> Program[TicketHolders]:
    return (yield WaitQuorum(name, count, fallback=fallback))


def now() -> Program[float]:
    return (yield Now())


def start(program: "Program[T]", label: str = "", step: int = 0, lane: str = "comm") -> Program[Handle[T]]:
    return (yield Start(program, label, step, lane))


def join(handle: Handle[T]) -> Program[T]:
    return (yield Join(handle))


def regroup(failure: Exception) -> Program[Present]:
    return (yield Regroup(failure))


def all_gather_ragged(wire: Tensor, limit: int) -> Program[list[Tensor]]:
    """Gather wires of data-dependent lengths: lengths first (8 bytes), then wires padded to the longest.

    `limit` is the most bytes any rank may announce; more is a corrupt length, refused before anything is allocated.
    """
    length = torch.tensor([wire.numel()], dtype=torch.int64, device=wire.device)
    lengths = _announced((yield from all_gather(length.view(torch.uint8))), limit)
    padded = wire.new_zeros(max(lengths))
    padded[: wire.numel()] = wire
    wires = yield AllGather(padded, agreed=True)
    cut = [w[:n] for w, n in zip(wires, lengths, strict=True)]
    return GatheredWires(cut, wires.known, wires.copied) if isinstance(wires, GatheredWires) else cut


def all_to_all_ragged(wires: Sequence[Tensor], limit: int) -> Program[list[Tensor]]:
    """Exchange wires of data-dependent lengths: lengths first (8 bytes a rank), then the wires themselves."""
    own = torch.tensor([w.numel() for w in wires], dtype=torch.int64, device=wires[0].device)
    answers = yield from all_to_all([n.view(torch.uint8) for n in own.split(1)], [8] * len(wires))
    return (yield from all_to_all(wires, _announced(answers, limit)))


def _announced(answers: Sequence[Tensor], limit: int) -> list[int]:
    lengths = [int(answer.clone().view(torch.int64)) for answer in answers]
    for rank, length in enumerate(lengths):
        if not 0 <= length <= limit:
            raise WireError(f"rank {rank} announces a wire of {length} bytes; at most {limit} are possible here")
    return lengths
