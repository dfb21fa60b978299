"""Runs a program on a lane: hands its verbs to whoever answers them, and explains what goes wrong."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from gossamer.core.errors import AttachError, PeerError, plainly
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
from gossamer.fabrics.book import Meet
from gossamer.fabrics.channel import Channel, Crossing, refuse
from gossamer.fabrics.habits import Habits
from gossamer.fabrics.lane import Running
from gossamer.fabrics.ledger import Traffic, traffic
from gossamer.fabrics.positions import Position, explain, position, read_all
from gossamer.fabrics.pulse import Pulse, Word, words
from gossamer.fabrics.tickets import Tickets
from gossamer.fabrics.watch import watch_of

P = ParamSpec("P")
T = TypeVar("T")

_PATIENCE = 1.0  # seconds that a rank in trouble gives the others to say where they are
_SLOW = 4.0  # seconds that it then gives a slow store


class Office(Protocol):
    """What a driver asks of the fabric it belongs to."""

    def start(self, program: Program[Any], label: str = "", step: int = 0, lane: str = "comm") -> Ticket[Any]: ...
    def join(self, ticket: Ticket[Any]) -> Any: ...
    def note(self, step: int, verb: str, label: str, numbers: Traffic, seconds: float) -> int: ...
    def amend(self, place: int, seconds: float) -> None: ...
    def busy(self, seconds: float) -> None: ...


class _Trouble(Exception):
    """The network or a peer failed; not the program."""


class _Own(Exception):
    """The program's own making or reading of a wire failed, in the midst of a request."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


class NetworkDriver:
    """Answers a lane's verbs on a channel and a board of its own; what concerns all lanes is on the fabric's."""

    def __init__(self, office: Office, lane: str, board: Board, pulse: Pulse, check: int, device: torch.device) -> None:
        self._office, self._lane, self._fabric, self._pulse, self._check = office, lane, board, pulse, check
        self._device, self.watch = device, watch_of(device, office.amend)
        self._board = board.under(f"lane/{lane}")
        self._tickets = Tickets(board.under("tickets"))  # for all lanes: one may claim what another waits for
        self._channel: Channel | None = None
        self.asking = False
        self.collectives = self._before = 0  # of this lane, and of the program under way
        self._habits = Habits()
        self._posted = list[tuple[Board, str]]()  # keys of the last meeting, which others may still read
        self._came_out = False  # of a collective after it, to which all had come

    @property
    def channel(self) -> Channel:
        assert self._channel is not None, "a lane is opened before it is used"
        return self._channel

    def open(self, number: int, says: str, make: Callable[[Meet], Channel], halt: threading.Event) -> None:
        """Make this lane's channel. All ranks do so at once; making a group blocks without saying for whom, so meet first."""
        for rank, text in _network(lambda: self._meet_all(self._fabric, f"open/{number}", says, halt)).items():
            if text != says:
                raise PeerError(f"rank {self._board.rank} {says}, but rank {rank} {text}")

        def meet(text: str) -> dict[int, str]:
            return self._meet_all(self._board, "book", text, halt)

        try:
            self._channel = make(meet)
        except AttachError:  # of all ranks alike
            raise
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error

    def hang_up(self, patience: float = 0.0) -> None:
        if self._channel is not None:
            self._channel.hang_up(patience)

    def clear_up(self) -> None:
        """Delete what this rank has posted, if all have read it."""
        if self._came_out:
            self._clear()

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
                refuse(verb, self.channel.size, self.channel.rank, self._device)
                self.collectives += 1
                if self._is_to_be_compared(verb, ticket):
                    self._compare(ticket, halt)
                self._before += 1
                answer = self._cross(verb, ticket)
                if isinstance(verb, AllReduce) and verb.tensor.numel():
                    self._tickets.all_have_come()
                if _waits_for_all(verb):
                    self._came_out = True
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
                refuse(verb, self.channel.size, self.channel.rank, self._device)
                return self._cross(verb, ticket)

    def _cross(self, verb: Crossing, ticket: Running) -> Any:
        began = self.watch.begin()
        self.asking = True
        try:
            answer = self.channel.answer(self._guarded(verb))
        except _Own as own:
            raise own.reason from None
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error
        finally:
            self.asking = False
        self._pulse.moves += 1
        numbers = traffic(verb, self._board.rank, self._board.size)
        self.watch.end(began, partial(self._office.note, ticket.step, type(verb).__name__, ticket.label, numbers))
        return answer

    def _guarded(self, verb: Crossing) -> Crossing:
        """Tell the program's own errors, and its own work, from the network's."""
        match verb:
            case AllGather(wire, read, agreed) if read is not None:
                return AllGather(wire, self._own(read), agreed)
            case AllToAll(wires, lengths, read):
                promises = [Promise(self._own(w.make), w.length) if isinstance(w, Promise) else w for w in wires]
                return AllToAll(promises, lengths, self._own(read) if read is not None else None)
            case _:
                return verb

    def _own(self, call: Callable[P, T]) -> Callable[P, T]:
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            self.asking = False
            try:
                return call(*args, **kwargs)
            except Exception as reason:
                raise _Own(reason) from reason
            finally:
                self.asking = True

        return guarded

    def _poll(self, ready: Callable[[], bool], halt: threading.Event) -> None:
        """Ask the store again and again, without a deadline: whoever joins watches over it."""
        self.asking = True
        try:
            poll(lambda: ready() or self._fabric.flag_is_up("broken"), float("inf"), halt)
        finally:
            self.asking = False

    def _closed(self, name: str, count: int, halt: threading.Event) -> tuple[int, ...]:
        """No deadline here: a quorum may take as long as a step takes; whoever joins has one."""
        holders: tuple[int, ...] | None = None
        self._tickets.sweep()

        def ready() -> bool:
            nonlocal holders
            holders = self._tickets.holders(name, count)
            return holders is not None

        self._poll(ready, halt)
        if holders is None:
            raise _Trouble("another rank has left this lane")
        return holders

    def _compare(self, ticket: Running, halt: threading.Event) -> None:
        """Before a lane's first collectives, and later ones that are unusual, see that all ranks are about to do the
        same: gloo aborts the process where sizes differ, and adds up different buckets of one size without a word.
        """
        mine, rank, key = self._position(ticket), self._board.rank, f"check/{self.collectives}"
        posts = _network(lambda: read_all(self._board, key, self._meet_all(self._board, key, mine.write(), halt)))
        if not all(mine.agrees(rank, post, other) for other, post in posts.items()):
            raise _Trouble("the ranks are about to do different things")

    def _is_to_be_compared(self, verb: Verb, ticket: Running) -> bool:
        if self._board.size == 1 or not self._check:
            return False
        unusual = self._habits.breaks_with(ticket.label, self._before, verb)
        return unusual or self.collectives <= self._check

    def _meet_all(self, board: Board, key: str, text: str, halt: threading.Event) -> dict[int, str]:
        """Post a text and read everybody else's."""
        posts = board.meet(key, text, lambda ready: self._poll(ready, halt))
        if len(posts) < self._board.size - 1:
            raise _Trouble("not all ranks have come to it")
        self._clear()  # who has come here has read what was posted before
        self._posted.append((board, f"{key}/{board.rank}"))
        self._came_out = False
        return posts

    def _clear(self) -> None:
        for board, key in self._posted:
            board.take_down(key)
        self._posted.clear()

    def _position(self, ticket: Running | None, trouble: str = "") -> Position:
        step, label, verb = (ticket.step, ticket.label, ticket.verb) if ticket else (0, "", None)
        return position(step, label, self.collectives, verb)._replace(trouble=trouble)

    def doomed(self, ticket: Running | None, words: Mapping[int, Word]) -> str:
        """Why a wait is in vain: a rank has left that never comes to the collective that is waited for."""
        verb = ticket.verb if ticket else None
        coming = self.collectives + isinstance(verb, Closed)
        away = [r for r, word in words.items() if word.state == "left" and word.done.get(self._lane, 0) < coming]
        match verb:
            case AllReduce() | AllGather() | AllToAll() if away:
                return "not all ranks come to it"
            case Closed(_, count) if len(away) > self._board.size - count:
                return "too few ranks are left for it"
            case _:
                return ""

    def account(self, ticket: Running | None, error: BaseException, inside: bool) -> BaseException:
        """Tell the others that this lane is lost, learn where they are, and make the error that says so.

        An error of the program's own goes to its joiner as it is, without waiting for anybody.
        """
        own = inside and not isinstance(error, _Trouble)
        reason = f"{type(error).__name__}: {plainly(error)}" if own else str(error)
        inquiry = Inquiry(self._fabric, self._position(ticket, reason))
        # The store's host may be gone in a way that makes its clients wait; nobody may wait for them.
        asking = threading.Thread(target=inquiry.ask, daemon=True)
        asking.start()
        if self._channel is not None:  # wakes the peers that wait for us
            self._channel.hang_up(patience=0.0) if inside else self._channel.tear()
        if own:
            return error
        asking.join(_PATIENCE + (_SLOW if self._pulse.answers() else 0.5))
        handed = traffic(ticket.verb, self._board.rank, self._board.size)[0] if ticket and ticket.verb else 0
        place = f"rank {self._board.rank} of {self._board.size}: {inquiry.mine}, {handed} bytes"
        told = PeerError(f"{place}. {inquiry.answer(self._pulse.answers())}")
        told.__cause__ = error.__cause__
        return told


class Inquiry:
    """What a rank in trouble asks of the others, while there is time: where are you, have you left, do you live?"""

    def __init__(self, board: Board, mine: Position) -> None:
        self._board, self.mine = board, mine
        self._found = dict[int, Position]()
        self._left, self._alive = list[int](), list[int]()
        self._done = self._refused = False
        self._wrong: PeerError | None = None

    def ask(self) -> None:
        try:
            self._board.raise_flag("broken", self.mine.trouble)
            before = words(self._board)
            self._found = self._positions()
            after = words(self._board)
            self._left = [r for r, word in after.items() if word.state == "left"]
            self._alive = [r for r, word in after.items() if r in before and before[r] != word]
            self._done = True
        except PeerError as wrong:
            self._wrong = wrong
        except RuntimeError:
            self._refused = True

    def _positions(self) -> dict[int, Position]:
        def wait(ready: Callable[[], bool]) -> None:
            poll(ready, _PATIENCE, threading.Event())

        posts = self._board.meet("end", self.mine.write(), wait)
        return read_all(self._board, "end", posts)

    def answer(self, slow: bool) -> str:
        """What is known by now; `slow` says that the store has answered a while ago."""
        if self._wrong is not None:
            return str(self._wrong)
        if self._done:
            return explain(self._board.rank, self._board.size, self.mine, self._found, self._left, self._alive)
        if slow and not self._refused:
            return "The store that knows where the others are answers too slowly to say it."
        return "The store does not answer: the process that hosts it, as a rule rank 0, is gone, frozen or cut off."


def _waits_for_all(verb: Verb) -> bool:
    """Whether nobody comes out of it before all have come to it: an empty one crosses no network."""
    match verb:
        case AllReduce(tensor, _):
            return tensor.numel() > 0
        case AllGather(wire):
            return wire.numel() > 0
        case _:
            return False


def _network(ask: Callable[[], Any]) -> Any:
    """What goes wrong in here is the network's doing, or a peer's."""
    try:
        return ask()
    except RuntimeError as error:
        raise _Trouble(plainly(error)) from error
