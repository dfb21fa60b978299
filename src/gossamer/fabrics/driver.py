"""Runs a program on a lane: hands its verbs to whoever answers them, and explains what goes wrong."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from gossamer.core.errors import AttachError, PeerError, plainly
from gossamer.core.groups import listed, plain, refuse_group
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Compute,
    Handle,
    Join,
    LazyWire,
    Now,
    OptimizerStep,
    Program,
    Regroup,
    Shared,
    Start,
    TakeTicket,
    TicketHolders,
    Verb,
    WaitQuorum,
)
from gossamer.fabrics.comm_thread import Task
from gossamer.fabrics.connection import Connection, Crossing, refuse
from gossamer.fabrics.failure_report import PATIENCE, FailureReport
from gossamer.fabrics.fingerprints import CollectiveFingerprint, position, read_all
from gossamer.fabrics.gloo import Gloo
from gossamer.fabrics.group import RankGroup
from gossamer.fabrics.heartbeat import Heartbeat, RankStatus
from gossamer.fabrics.ledger import Traffic, traffic
from gossamer.fabrics.rendezvous import Meet
from gossamer.fabrics.shared_store import SharedStore, poll
from gossamer.fabrics.stuck import may_wait
from gossamer.fabrics.timers import request_timer_of

P = ParamSpec("P")
T = TypeVar("T")

_SLOW = 4.0  # seconds that a rank in trouble gives a slow store


class Parent(Protocol):
    """What a driver asks of the fabric it belongs to."""

    @property
    def per_node(self) -> int: ...
    def start(self, program: Program[Any], label: str = "", step: int = 0, lane: str = "comm") -> Handle[Any]: ...
    def join(self, handle: Handle[Any]) -> Any: ...
    def note(self, step: int, verb: str, label: str, numbers: Traffic, among: Among, seconds: float) -> int: ...
    def amend(self, place: int, seconds: float) -> None: ...
    def busy(self, seconds: float) -> None: ...


class _Trouble(Exception):
    """The network or a peer failed; not the program."""


class _Own(Exception):
    """The program's own making or reading of a wire failed, in the midst of a request."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


Make = Callable[[Meet, Among], Connection]  # a connection of everybody, or of some ranks


class NetworkDriver:
    """Answers a lane's verbs on connections and a store of its own; what concerns all lanes is on the fabric's."""

    def __init__(
        self, parent: Parent, lane: str, store: SharedStore, pulse: Heartbeat, check: int, device: torch.device
    ) -> None:
        self._parent, self._lane, self._fabric, self._pulse, self._check = parent, lane, store, pulse, check
        self._device, self.watch = device, request_timer_of(device, parent.amend)
        self._store = store.under(f"lane/{lane}")
        self._world = RankGroup(None, self._store, store)
        self._groups: dict[Among, RankGroup] = {None: self._world}
        self.asking = False
        self.patience = PATIENCE  # that others have, in trouble, to say where they are

    def open(self, number: int, says: str, make: Make, halt: threading.Event) -> None:
        """Connect this lane. All ranks do so at once; making a group blocks without saying for whom, so meet first."""
        self._agree(self._fabric, f"open/{number}", says, halt)
        self._connect(self._world, make, halt)

    def form(self, number: int, groups: Sequence[tuple[int, ...]], make: Make, halt: threading.Event) -> None:
        """Make the connections of groups, one after the other; all ranks do so, also those who belong to none."""
        self._agree(self._store, f"groups/{number}", f"makes the groups {', '.join(map(listed, groups))}", halt)
        for ranks in groups:
            if self._store.rank in ranks and ranks not in self._groups:
                group = RankGroup(ranks, self._store, self._fabric)
                self._connect(group, make, halt)
                self._groups[ranks] = group

    def _agree(self, store: SharedStore, key: str, says: str, halt: threading.Event) -> None:
        for rank, text in _network(lambda: self._meet_all(self._world, store, key, says, halt)).items():
            if text != says:
                raise PeerError(f"rank {store.rank} {says}, but rank {rank} {text}")

    def _connect(self, group: RankGroup, make: Make, halt: threading.Event) -> None:
        def meet(text: str) -> dict[int, str]:
            return self._meet_all(group, group.store, "book", text, halt)

        try:
            group.connect(make(meet, group.among))
        except AttachError:  # of all ranks alike
            raise
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error

    def hang_up(self, patience: float = 0.0) -> None:
        for group in [*self._groups.values()]:
            group.hang_up(patience)

    def tear(self) -> None:
        """From any thread: peers that wait for this lane fail at once."""
        for group in [*self._groups.values()]:
            group.tear()

    def clear_up(self) -> None:
        """Delete what this rank has posted, if all have read it."""
        for group in self._groups.values():
            if group.came_out:
                group.clear()

    def left(self) -> list[str]:
        """Keys and counters that are for whoever leaves last to delete."""
        return [key.removeprefix(self._fabric.place) for group in self._groups.values() for key in group.left()]

    def done(self) -> dict[str, int]:
        """How many collectives each group has had, by this lane's name and its own."""
        return {self._called(group): group.collectives for group in self._groups.values()}

    def _called(self, group: RankGroup) -> str:
        return f"{self._lane} {group.name}".strip()

    def drive(self, handle: Task, halt: threading.Event) -> Any:
        began = time.thread_time()  # waiting costs none of it
        try:
            return self._drive(handle, halt)
        finally:
            self._parent.busy(time.thread_time() - began)

    def _drive(self, handle: Task, halt: threading.Event) -> Any:
        """As `core.programs.drive`, but that a program never hears of trouble, and stops where the lane does."""
        program, answer, error = handle.program, None, None
        for group in self._groups.values():
            group.before = 0
        while True:
            try:
                verb = program.send(answer) if error is None else program.throw(error)
            except StopIteration as stop:
                return stop.value
            handle.verb, answer, error = verb, None, None
            try:
                answer = self._answer(verb, handle, halt)
            except _Trouble:  # not for the program to handle: the lane is lost
                with suppress(RuntimeError):
                    program.close()
                raise
            except Exception as failure:
                error = failure
            if halt.is_set():
                raise _Trouble("the lane was closed")

    def _answer(self, verb: Verb, handle: Task, halt: threading.Event) -> Any:
        match verb:
            case Compute(work):
                return work()
            case Now():
                return time.monotonic()
            case Start(program, label, step, lane):
                return self._parent.start(program, label, step, lane)
            case Join(other):
                return self._parent.join(other)
            case OptimizerStep() | Regroup():
                raise RuntimeError(
                    "only the program that a host drives may yield Descend or Regroup, not one on a lane"
                )
            case _:
                refuse_group(verb, self._store.rank, self._store.size)
                return self._answer_in(self._group_of(verb), verb, handle, halt)

    def _answer_in(self, group: RankGroup, verb: Shared, handle: Task, halt: threading.Event) -> Any:
        match verb:
            case AllReduce() | AllGather() | AllToAll():
                refuse(verb, group.connection.size, group.connection.rank, self._device)
                group.collectives += 1
                if self._is_to_be_compared(group, verb, handle):
                    self._compare(group, handle, halt)
                group.before += 1
                answer = self._cross(group, verb, handle)
                if isinstance(verb, AllReduce) and verb.tensor.numel():
                    group.tickets.all_have_come()
                if _waits_for_all(verb):
                    group.came_out = True
                return answer
            case TakeTicket(name):
                return _network(lambda: group.tickets.claim(name))
            case WaitQuorum():
                return _network(lambda: self._closed(group, verb, halt))
            case _:
                refuse(verb, group.connection.size, group.connection.rank, self._device)
                return self._cross(group, verb, handle)

    def _group_of(self, verb: Shared) -> RankGroup:
        among = plain(verb, self._store.size).among
        if among is not None and len(among) == 1 and among not in self._groups:  # nothing to connect
            self._groups[among] = alone = RankGroup(among, self._store, self._fabric)
            alone.connect(Gloo(None, 0, 1))
        if among not in self._groups:
            raise ValueError(
                f"there is no group {listed(among or ())} on lane {self._lane!r}: a part says in `groups` among whom it talks"
            )
        return self._groups[among]

    def _cross(self, group: RankGroup, verb: Crossing, handle: Task) -> Any:
        began = self.watch.begin()
        self.asking = True
        try:
            answer = group.connection.answer(self._guarded(verb))
        except _Own as own:
            raise own.reason from None
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error
        finally:
            self.asking = False
        self._pulse.moves += 1
        numbers, name = traffic(verb, self._store.rank, self._store.size, self._parent.per_node), type(verb).__name__
        self.watch.end(began, partial(self._parent.note, handle.step, name, handle.label, numbers, group.among))
        return answer

    def _guarded(self, verb: Crossing) -> Crossing:
        """Tell the program's own errors, and its own work, from the network's."""
        match verb:
            case AllGather(_, read) if read is not None:
                return replace(verb, read=self._own(read))
            case AllToAll(wires, _, read):
                promises = [LazyWire(self._own(w.make), w.length) if isinstance(w, LazyWire) else w for w in wires]
                return replace(verb, wires=promises, read=self._own(read) if read is not None else None)
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

    def _closed(self, group: RankGroup, verb: WaitQuorum, halt: threading.Event) -> TicketHolders:
        """No deadline here: a quorum may take as long as a step takes; whoever joins has one."""
        holders: tuple[int, ...] | None = None
        began, seen = time.monotonic(), list[float]()
        group.tickets.sweep()

        def ready() -> bool:
            nonlocal holders
            count = verb.count
            if verb.fallback:
                since = time.monotonic() - began
                drawn = group.tickets.drawn(verb.name)
                seen.extend([since] * (drawn - len(seen)))
                enough = drawn >= count or any(since >= s and drawn >= least for s, least in verb.fallback)
                count = group.tickets.settled(verb.name, min(drawn, count) if enough else None)
            holders = group.tickets.holders(verb.name, count) if count else None
            return holders is not None

        self._poll(ready, halt)
        if holders is None:
            raise _Trouble("another rank has left this lane")
        return TicketHolders.seen(holders, seen[: len(holders)])

    def _compare(self, group: RankGroup, handle: Task, halt: threading.Event) -> None:
        """Before a group's first collectives, and later ones that are unusual, see that all its ranks are about to do the
        same: gloo aborts the process where sizes differ, and adds up different buckets of one size without a word.
        """
        mine, store, key = self._position(handle), group.store, f"check/{group.collectives}"
        posts = _network(lambda: read_all(store, key, self._meet_all(group, store, key, mine.write(), halt)))
        if not all(mine.agrees(store.rank, post, other) for other, post in posts.items()):
            raise _Trouble("the ranks are about to do different things")

    def _is_to_be_compared(self, group: RankGroup, verb: Verb, handle: Task) -> bool:
        if len(group.ranks) == 1 or not self._check:
            return False
        unusual = group.usual.breaks_with(handle.label, group.before, verb, handle.by_itself)
        return unusual or group.collectives <= self._check

    def _meet_all(
        self, group: RankGroup, store: SharedStore, key: str, text: str, halt: threading.Event
    ) -> dict[int, str]:
        """Post a text and read everybody else's."""
        posts = group.meet(store, key, text, lambda ready: self._poll(ready, halt))
        if len(posts) < store.size - 1:
            raise _Trouble("not all ranks have come to it")
        return posts

    def _position(self, handle: Task | None, trouble: str = "") -> CollectiveFingerprint:
        if handle is None:
            return position(0, "", self._world.collectives, None)._replace(trouble=trouble)
        number = self._asked(handle.verb).collectives
        return position(handle.step, handle.label, number, handle.verb, handle.by_itself)._replace(trouble=trouble)

    def _asked(self, verb: Verb | None) -> RankGroup:
        """Whom a request is asked of; everybody, if of nobody."""
        return self._groups.get(verb.among, self._world) if isinstance(verb, Shared) else self._world

    def doomed(self, handle: Task | None, words: Mapping[int, RankStatus]) -> str:
        """Why a wait is in vain: a rank has left that never comes to the collective that is waited for."""
        verb = handle.verb if handle else None
        group = self._asked(verb)
        coming, name = group.collectives + isinstance(verb, WaitQuorum), self._called(group)
        gone = {r: word for r, word in words.items() if word.state == "left" and r in group.ranks}
        away = [r for r, word in gone.items() if word.done.get(name, 0) < coming]
        match verb:
            case AllReduce() | AllGather() | AllToAll() if away:
                return "not all ranks come to it"
            case WaitQuorum() if len(away) > len(group.ranks) - min([verb.count, *(n for _, n in verb.fallback)]):
                return "too few ranks are left for it"
            case _:
                return ""

    def account(self, handle: Task | None, error: BaseException, inside: bool) -> BaseException:
        """Tell the others that this lane is lost, learn where they are, and make the error that says so.

        An error of the program's own goes to its joiner as it is, without waiting for anybody.
        """
        own = inside and not isinstance(error, _Trouble)
        reason = f"{type(error).__name__}: {plainly(error)}" if own else str(error)
        inquiry = FailureReport(self._fabric, self._position(handle, reason), self.patience)
        # The store's host may be gone in a way that makes its clients wait; nobody may wait for them.
        asking = threading.Thread(target=inquiry.ask, daemon=True)
        may_wait(asking, self._fabric.raw)
        asking.start()
        for group in [*self._groups.values()]:  # wakes the peers that wait for us
            group.hang_up(patience=0.0) if inside else group.tear()
        if own:
            return error
        asking.join(self.patience + (_SLOW if self._pulse.answers() else 0.5))
        handed = traffic(handle.verb, self._store.rank, self._store.size)[0] if handle and handle.verb else 0
        place = f"rank {self._store.rank} of {self._store.size}: {inquiry.mine}, {handed} bytes"
        told = PeerError(f"{place}. {inquiry.answer(self._pulse.answers())}")
        told.__cause__ = error.__cause__
        return told


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
