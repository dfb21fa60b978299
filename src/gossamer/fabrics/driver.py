"""Runs a program on a lane: hands its verbs to whoever answers them, and explains what goes wrong."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ParamSpec, Protocol, TypeVar

from gossamer.core.errors import PeerError, plainly
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Claim,
    Closed,
    Compute,
    Descend,
    Join,
    Program,
    Promise,
    Start,
    Ticket,
    Verb,
)
from gossamer.fabrics.board import Board, poll
from gossamer.fabrics.channel import Channel, Crossing, refuse
from gossamer.fabrics.habits import Habits
from gossamer.fabrics.lane import Running
from gossamer.fabrics.ledger import traffic
from gossamer.fabrics.positions import Position, explain, position
from gossamer.fabrics.tickets import Tickets

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 1.0  # seconds that a rank in trouble gives the others to say where they are


class Office(Protocol):
    """What a driver asks of the fabric it belongs to."""

    def start(self, program: Program[Any], label: str = "", step: int = 0, lane: str = "comm") -> Ticket[Any]: ...
    def join(self, ticket: Ticket[Any]) -> Any: ...
    def note(self, verb: Verb, ticket: Running, seconds: float) -> None: ...
    def busy(self, seconds: float) -> None: ...


class _Trouble(Exception):
    """The network or a peer failed; not the program."""


class _Own(Exception):
    """The program's own making or reading of a wire failed, in the midst of a request."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


def _guarded(verb: Crossing) -> Crossing:
    """Tell the program's own errors from the network's."""
    match verb:
        case AllGather(wire, read, agreed) if read is not None:
            return AllGather(wire, _own(read), agreed)
        case AllToAll(wires, lengths, read):
            promises = [Promise(_own(w.make), w.length) if isinstance(w, Promise) else w for w in wires]
            return AllToAll(promises, lengths, _own(read) if read is not None else None)
        case _:
            return verb


def _own(call: Callable[P, T]) -> Callable[P, T]:
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except Exception as reason:
            raise _Own(reason) from reason

    return guarded


class NetworkDriver:
    """Answers a lane's verbs on a channel and a board of its own."""

    def __init__(
        self, office: Office, channel: Channel, board: Board, tickets: Board, deadline: float, check: int
    ) -> None:
        self._office, self._channel, self._board = office, channel, board
        self._tickets = Tickets(tickets)  # the board is shared by all lanes: one may claim what another waits for
        self._deadline, self._check = deadline, check
        self._collectives = self._before = 0  # of this lane, and of the program under way
        self._habits = Habits()
        self._compared = ""  # the key under which the last comparison was posted

    def drive(self, ticket: Running, halt: threading.Event) -> Any:
        began = time.thread_time()  # waiting costs none of it
        try:
            return self._drive(ticket, halt)
        finally:
            self._office.busy(time.thread_time() - began)

    def _drive(self, ticket: Running, halt: threading.Event) -> Any:
        program, answer, error = ticket.program, None, None
        self._before = 0
        while True:
            try:
                verb = program.send(answer) if error is None else program.throw(error)
            except StopIteration as stop:
                return stop.value
            ticket.verb, answer, error = verb, None, None
            try:
                answer = self._answer(verb, ticket, halt)
            except _Trouble:  # not for the program to handle: the lane is lost
                with suppress(RuntimeError):
                    program.close()
                raise
            except Exception as failure:
                error = failure
            if halt.is_set():
                raise _Trouble("the lane was closed")

    def _answer(self, verb: Verb, ticket: Running, halt: threading.Event) -> Any:
        match verb:
            case AllReduce() | AllGather() | AllToAll():
                refuse(verb, self._channel.size, self._channel.rank)
                self._collectives += 1
                if self._is_to_be_compared(verb, ticket):
                    self._compare(ticket, halt)
                self._before += 1
                answer = self._cross(verb, ticket)
                if isinstance(verb, AllReduce) and verb.tensor.numel():
                    self._tickets.all_have_come()
                return answer
            case Compute(work):
                return work()
            case Start(program, label, step, lane):
                return self._office.start(program, label, step, lane)
            case Join(other):
                return self._office.join(other)
            case Claim(name):
                return _network(lambda: self._tickets.claim(name))
            case Closed(name, count):
                return _network(lambda: self._closed(name, count, halt))
            case Descend():
                raise RuntimeError("only the program that a host drives may yield Descend, not one on a lane")
            case _:
                refuse(verb, self._channel.size, self._channel.rank)
                return self._cross(verb, ticket)

    def _cross(self, verb: Crossing, ticket: Running) -> Any:
        begin = time.perf_counter()
        try:
            answer = self._channel.answer(_guarded(verb))
        except _Own as own:
            raise own.reason from None
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error
        self._office.note(verb, ticket, time.perf_counter() - begin)
        return answer

    def _closed(self, name: str, count: int, halt: threading.Event) -> tuple[int, ...]:
        """No deadline here: a quorum may take as long as a step takes; whoever joins has one."""
        holders: tuple[int, ...] | None = None
        self._tickets.sweep()

        def ready() -> bool:
            nonlocal holders
            holders = self._tickets.holders(name, count)
            return holders is not None or self._board.flag_is_up("broken")

        poll(ready, float("inf"), halt)
        if holders is None:
            raise _Trouble("another rank has left this lane")
        return holders

    def _compare(self, ticket: Running, halt: threading.Event) -> None:
        """Before a lane's first collectives, and later ones that are unusual, see that all ranks are about to do the
        same: gloo aborts the process where sizes differ, and adds up different buckets of one size without a word.
        """
        mine, rank, key = self._position(ticket), self._channel.rank, f"check/{self._collectives}"
        posts = _network(lambda: self._meet(key, mine, self._deadline, halt))
        if not all(mine.agrees(rank, post, other) for other, post in posts.items()):
            raise _Trouble("the ranks are about to do different things")
        if len(posts) < self._channel.size - 1:
            raise _Trouble("not all ranks have come to it")
        if self._compared:  # who has come here has read what was posted there
            _network(lambda: self._board.take_down(f"{self._compared}/{rank}"))
        self._compared = key

    def _is_to_be_compared(self, verb: Verb, ticket: Running) -> bool:
        if self._channel.size == 1 or not self._check:
            return False
        unusual = self._habits.breaks_with(ticket.label, self._before, verb)
        return unusual or self._collectives <= self._check

    def _meet(self, key: str, mine: Position, seconds: float, halt: threading.Event) -> dict[int, Position]:
        def wait(ready: Callable[[], bool]) -> None:
            poll(lambda: ready() or (key != "end" and self._board.flag_is_up("broken")), seconds, halt)

        posts = self._board.meet(key, mine.write(), wait)
        return {rank: Position.read(text) for rank, text in posts.items()}

    def _position(self, ticket: Running | None, trouble: str = "") -> Position:
        step, label, verb = (ticket.step, ticket.label, ticket.verb) if ticket else (0, "", None)
        return position(step, label, self._collectives, verb)._replace(trouble=trouble)

    def account(self, ticket: Running | None, error: BaseException, inside: bool) -> BaseException:
        """Tell the others that this lane is lost, learn where they are, and make the error that says so.

        An error of the program's own goes to its joiner as it is, without waiting for anybody.
        """
        own = inside and not isinstance(error, _Trouble)
        reason = f"{type(error).__name__}: {plainly(error)}" if own else str(error)
        mine, found, left = self._position(ticket, reason), dict[int, Position](), list[int]()
        unheard = True

        def ask() -> None:
            nonlocal unheard
            with suppress(RuntimeError):
                self._board.raise_flag("broken", reason)
                found.update(self._meet("end", mine, _PATIENCE, threading.Event()))
                left.extend(self._board.left())
                unheard = False

        # The store's host may be gone in a way that makes its clients wait; nobody may wait for them.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        if inside:
            self._channel.hang_up(patience=0.0)  # wakes the peers that wait for us
        if own:
            return error
        asking.join(_PATIENCE + 0.5)
        told = self._tell(ticket, mine, dict(found), list(left), unheard)
        told.__cause__ = error.__cause__
        return told

    def _tell(
        self, ticket: Running | None, mine: Position, found: dict[int, Position], left: list[int], unheard: bool
    ) -> PeerError:
        size, rank = self._channel.size, self._channel.rank
        handed = traffic(ticket.verb, rank, size)[0] if ticket and ticket.verb else 0
        others = (
            "The store does not answer: the process that hosts it, as a rule rank 0, is gone, frozen or cut off."
            if unheard
            else explain(rank, size, mine, found, left)
        )
        return PeerError(f"rank {rank} of {size}: {mine}, {handed} bytes. {others}")


def _network(ask: Callable[[], Any]) -> Any:
    """What goes wrong in here is the network's doing, or a peer's."""
    try:
        return ask()
    except RuntimeError as error:
        raise _Trouble(plainly(error)) from error
