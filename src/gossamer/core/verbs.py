"""What an algorithm can ask of the network.

An algorithm is a generator. It yields one of the verbs below and is sent the answer; nothing in it knows which
fabric answers. The functions at the end are the typed face for authors: `mean = yield from all_reduce(x)`.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gossamer.core.errors import WireError

T = TypeVar("T")
ReduceOp = Literal["sum", "max", "min"]
Among = tuple[int, ...] | None
"""Who takes part in a request: these ranks, or everybody. Ranks in the request and in its answer are counted in the group:
0 is its first. All of a group make the same requests in the same order; see `core.groups` for whole programs.
"""


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Give a tensor, get the reduction of all ranks' tensors; the given tensor may be overwritten."""

    tensor: Tensor
    op: ReduceOp = "sum"
    among: Among = None


Read = Callable[[int, Tensor], None]


@dataclass(frozen=True, eq=False)
class AllGather:
    """Give a wire, get every rank's wire in rank order; all wires have the same length.

    With `read`, nothing is answered: read(j, wire) is called as the wires come, in the order of `receive_order`, each while the
    next one travels. `agreed` says that the ranks have just agreed on the length, so that a new one is nothing strange.
    """

    wire: Tensor
    read: Read | None = None
    agreed: bool = False
    among: Among = None


@dataclass(frozen=True, eq=False)
class LazyWire:
    """A wire of known length that is made when its turn comes, while the one before it travels."""

    make: Callable[[], Tensor]
    length: int

    def numel(self) -> int:
        return self.length

    def keep(self) -> Tensor:
        wire = self.make()
        if wire.numel() != self.length:
            raise WireError(f"a wire of {self.length} bytes was promised, and one of {wire.numel()} made")
        return wire


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Give one wire per rank, or the promise of one, get one from every rank; `lengths[j]` bytes come from rank j.

    Promises are kept for the own rank, the next one, the one after that, and so on. `read` is as in an all-gather.
    """

    wires: Sequence[Tensor | LazyWire]
    lengths: Sequence[int]
    read: Read | None = None
    among: Among = None


@dataclass(frozen=True, eq=False)
class Send:
    """Hand a wire to one rank and go on; the wire must not be written to afterwards.

    `awaits` are the (rank, length) pairs that this program will receive next. A backend that knows of them before the wire
    leaves can carry both directions of a link at once.
    """

    to: int
    wire: Tensor
    awaits: Sequence[tuple[int, int]] = ()
    among: Among = None


@dataclass(frozen=True, eq=False)
class Receive:
    """Wait for the next wire of `length` bytes from one rank, or, if the source is None, from whoever is first.

    Then the answer is the rank and its wire. Who is first is a matter of time, so what is made of it must bear that.
    """

    source: int | None
    length: int
    among: Among = None


@dataclass(frozen=True)
class TakeTicket:
    """Draw the next ticket of a counter all ranks share; the first ticket is 1."""

    name: str
    among: Among = None


@dataclass(frozen=True)
class WaitQuorum:
    """Wait until `count` tickets are drawn, and learn which ranks drew them, in order: `TicketHolders`.

    `fallback` are (seconds, tickets): so long after the request so many are enough, and whoever sees that first closes the
    counter for all, with as many as are drawn by then.
    """

    name: str
    count: int
    among: Among = None
    fallback: tuple[tuple[float, int], ...] = ()


class TicketHolders(tuple[int, ...]):
    """Ranks that drew tickets, in order, and how long after the request each was seen."""

    seconds: tuple[float, ...] = ()

    @staticmethod
    def seen(ranks: Sequence[int], seconds: Sequence[float]) -> "TicketHolders":
        out = TicketHolders(ranks)
        out.seconds = tuple(seconds)
        return out


@dataclass(frozen=True, eq=False)
class Compute:
    """Do local work; `seconds` is what it costs on a virtual clock."""

    work: Callable[[], Any]
    label: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Now:
    """What time it is, in seconds since nobody knows when; on a virtual clock, that."""


def send_order(rank: int, size: int) -> list[int]:
    """In which order a rank makes wires for all others: its own first, then the next rank's, ..."""
    return [(rank + i) % size for i in range(size)]


def receive_order(rank: int, size: int) -> list[int]:
    """In which order a rank reads what all others sent: its own first, then that of the rank before it, ..."""
    return [(rank - i) % size for i in range(size)]


def kept(wire: Tensor | LazyWire) -> Tensor:
    return wire.keep() if isinstance(wire, LazyWire) else wire


class Handle(Generic[T]):
    """A program under way: join it to get its result."""

    def done(self) -> bool:
        raise NotImplementedError

    def failed(self) -> bool:
        """Whether it has ended with an error, which joining it raises."""
        return False

    def overdue(self) -> bool:
        """Whether it takes longer than a deadline: who never waits for it would not learn that the others stand still."""
        return False


@dataclass(frozen=True, eq=False)
class Start:
    """Put a program on a comm lane; lanes run their programs one after the other, in the order of starting."""

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
    """What all ranks agreed on for a step: the gradient, None where nobody applies it, and each parameter group's rate."""

    gradient: Tensor | None
    rates: Sequence[float]


@dataclass(frozen=True)
class OptimizerStep:
    """The optimizer steps now. Answered with False where the user's scaler skipped the step.

    With `missed`, it first makes up for a step that ended without this rank; that is no step of this rank's own.
    """

    missed: LateUpdate | None = None


@dataclass(frozen=True, eq=False)
class Regroup:
    """After a failure, go on with those who are there: who is lost is left out, and who has come back is taken in.

    Answered with `Present`. Where nobody may be lost, or it is no help, the failure is raised.
    """

    failure: Exception


class Present(NamedTuple):
    """Who is there: this rank's place among them, their numbers, and in which of its lives each is.

    `joins` says that this rank came when others were at work.
    """

    place: int
    ranks: tuple[int, ...]
    lives: tuple[int, ...]
    joins: bool = False

    @staticmethod
    def all_of(rank: int, size: int) -> "Present":
        """Where nobody may be lost."""
        return Present(rank, tuple(range(size)), (0,) * size)

    @property
    def life(self) -> int:
        """Another one than before, where this rank was given up for lost."""
        return self.lives[self.place]

    def without(self, others: "Present") -> list[int]:
        """Who is here, and not among the others; or in another life."""
        there = {*zip(others.ranks, others.lives)}
        return [rank for rank, life in zip(self.ranks, self.lives) if (rank, life) not in there]


Shared = (
    AllReduce | AllGather | AllToAll | Send | Receive | TakeTicket | WaitQuorum
)  # which several ranks have a part in
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
    """An all-gather that reads each wire while the next one travels."""
    yield AllGather(wire, read)


def read_all_to_all(wires: Sequence[Tensor | LazyWire], lengths: Sequence[int], read: Read) -> Program[None]:
    """An all-to-all that makes each wire while the one before it travels, and reads each while the next one does."""
    yield AllToAll(wires, lengths, read)


def send(to: int, wire: Tensor, awaits: Sequence[tuple[int, int]] = ()) -> Program[None]:
    yield Send(to, wire, awaits)


def receive(source: int, length: int) -> Program[Tensor]:
    return (yield Receive(source, length))


def receive_first(length: int) -> Program[tuple[int, Tensor]]:
    """Whoever's wire is there first: its rank, and the wire."""
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
    """Gather wires whose lengths depend on the data: lengths first (8 bytes), then wires padded to the longest.

    `limit` is the most bytes any rank may announce; more is a corrupt length, refused before anything is allocated.
    """
    length = torch.tensor([wire.numel()], dtype=torch.int64, device=wire.device)
    answers = yield from all_gather(length.view(torch.uint8))
    lengths = [int(a.clone().view(torch.int64)) for a in answers]
    for rank, n in enumerate(lengths):
        if not 0 <= n <= limit:
            raise WireError(f"rank {rank} announces a wire of {n} bytes; at most {limit} are possible here")
    padded = wire.new_zeros(max(lengths))
    padded[: wire.numel()] = wire
    wires = yield AllGather(padded, agreed=True)
    return [w[:n] for w, n in zip(wires, lengths, strict=True)]


def all_to_all_ragged(wires: Sequence[Tensor], limit: int) -> Program[list[Tensor]]:
    """Exchange wires whose lengths depend on the data: lengths first (8 bytes a rank), then the wires themselves."""
    own = torch.tensor([w.numel() for w in wires], dtype=torch.int64, device=wires[0].device)
    announced = yield from all_to_all([n.view(torch.uint8) for n in own.split(1)], [8] * len(wires))
    lengths = [int(a.clone().view(torch.int64)) for a in announced]
    for rank, n in enumerate(lengths):
        if not 0 <= n <= limit:
            raise WireError(f"rank {rank} announces a wire of {n} bytes; at most {limit} are possible here")
    return (yield from all_to_all(wires, lengths))
