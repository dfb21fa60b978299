"""Runs a program on a comm thread: sends each verb to its connection or store, and reports failures."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from gossamer.core.errors import AttachError, PeerError, plainly
from gossamer.core.groups import listed, plain, refuse_group
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Compute,
    Join,
    Now,
    OptimizerStep,
    Receive,
    Regroup,
    Send,
    Shared,
    Start,
    TakeTicket,
    TicketHolders,
    Verb,
    WaitQuorum,
)
from gossamer.core.wire import LazyWire
from gossamer.costs.crossing import traffic
from gossamer.fabrics.liveness.heartbeat import Heartbeat, RankStatus
from gossamer.fabrics.liveness.store import SharedStore, may_wait, poll
from gossamer.fabrics.torch.comm_thread import Task
from gossamer.fabrics.torch.connection import Connection, Crossing, refuse
from gossamer.fabrics.torch.fingerprints import PATIENCE, CollectiveFingerprint, FailureReport, position, read_all
from gossamer.fabrics.torch.gloo import Gloo
from gossamer.fabrics.torch.group import RankGroup
from gossamer.fabrics.torch.last_collective import LastCollective
from gossamer.fabrics.torch.rendezvous import Meet
from gossamer.fabrics.torch.tickets import QuorumWait
from gossamer.fabrics.torch.timers import request_timer_of

if TYPE_CHECKING:
    from gossamer.fabrics.torch.fabric import TorchFabric

P = ParamSpec("P")
T = TypeVar("T")

_SLOW = 4.0  # more seconds that a failed rank waits for a slow store
_LOOK = 0.25  # seconds between two looks at the connections, while this rank waits in the store


class _Trouble(Exception):
    """The network or a peer failed; not the program."""


class _Own(Exception):
    """The program's own code failed while it made or read a wire, within a request."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason


Make = Callable[[Meet, Among], Connection]  # connects all ranks, or some


class NetworkDriver:
    """Answers the verbs of one comm thread, on its own connections and its own part of the fabric's store."""

    def __init__(
        self, parent: "TorchFabric", lane: str, store: SharedStore, pulse: Heartbeat, check: int, device: torch.device
    ) -> None:
        self._parent, self._lane, self._fabric, self._pulse, self._check = parent, lane, store, pulse, check
        self._device, self.watch = device, request_timer_of(device, parent.amend)
        self._store = store.under(f"lane/{lane}")
        self._world = RankGroup(None, self._store, store)
        self._groups: dict[Among, RankGroup] = {None: self._world}
        self.asking = False
        self.last: LastCollective | None = None  # kept where ranks may be lost
        self.patience = PATIENCE  # seconds that the others have, after a failure, to report their position

    def open(self, number: int, says: str, make: Make, halt: threading.Event) -> None:
        """Connect this comm thread; all ranks do so together.

        The ranks meet in the store first, since creating a group blocks without saying which rank is missing.
        """
        self._agree(self._fabric, f"open/{number}", says, halt)
        self._connect(self._world, make, halt)

    def form(self, number: int, groups: Sequence[tuple[int, ...]], make: Make, halt: threading.Event) -> None:
        """Connect groups of ranks, one after the other; all ranks call this, also those in no group."""
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
        books = itertools.count()  # gloo connects once for each network card in GLOO_SOCKET_IFNAME

        def meet(text: str) -> dict[int, str]:
            return self._meet_all(group, group.store, f"book{next(books)}", text, halt)

        try:
            group.connect(make(meet, group.among))
            meet("connected")  # to one that still connects, a rank that leaves at once would look lost
        except AttachError:  # of all ranks alike
            raise
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error

    def hang_up(self, patience: float = 0.0) -> None:
        for group in [*self._groups.values()]:
            group.hang_up(patience)

    def tear(self) -> None:
        """Break all connections, from any thread; peers that wait for this comm thread fail at once."""
        for group in [*self._groups.values()]:
            group.tear()

    def clear_up(self) -> None:
        """Delete the keys that this rank has posted, if all ranks have read them."""
        for group in self._groups.values():
            if group.came_out:
                group.clear()

    def left(self) -> list[str]:
        """Keys and counters that the last rank to leave deletes."""
        return [key.removeprefix(self._fabric.place) for group in self._groups.values() for key in group.left()]

    def done(self) -> dict[str, int]:
        """Number of collectives of each group, by the names of comm thread and group."""
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
        """Like `core.programs.drive`, but a network failure is not thrown into the program, and a closed comm thread ends it."""
        program, answer, error = handle.program, None, None
        for group in self._groups.values():
            group.before = 0
        while True:
            try:
                verb = program.send(answer) if error is None else program.throw(error)
            except StopIteration as stop:
                if self.last is not None:
                    self.last.ended()
                return stop.value
            handle.verb, answer, error = verb, None, None
            try:
                answer = self._answer(verb, handle, halt)
            except _Trouble:  # not for the program to handle: the comm thread is lost
                self._leave_off(handle, verb, False, None)
                raise
            except Exception as failure:
                error = failure
            if halt.is_set():
                self._leave_off(handle, verb, True, answer)
                raise _Trouble("the comm thread was closed")

    def _leave_off(self, handle: Task, verb: Verb, arrived: bool, answer: Any) -> None:
        """End a program whose comm thread is lost, or keep it for when its ranks have met again."""
        if self.last is not None:
            asked = plain(verb, self._store.size) if isinstance(verb, Shared) else verb
            self.last.broke(handle, asked, arrived, answer)
            return
        with suppress(RuntimeError):
            handle.program.close()

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
                    f"{type(verb).__name__} in a program on comm thread {self._lane!r}: only the program that the integration "
                    "runs on the training thread may yield OptimizerStep or Regroup"
                )
            case _:
                refuse_group(verb, self._store.rank, self._store.size)
                return self._answer_in(self._group_of(verb), verb, handle, halt)

    def _answer_in(self, group: RankGroup, verb: Shared, handle: Task, halt: threading.Event) -> Any:
        match verb:
            case TakeTicket(name):
                return _network(lambda: group.tickets.claim(name))
            case WaitQuorum():
                return _network(lambda: self._closed(group, verb, halt))
            case _:
                refuse(verb, group.connection.size, group.connection.rank, self._device)
        if isinstance(verb, Send | Receive):
            return self._cross(group, verb, handle)
        if group.counts(verb, handle.label, handle.by_itself, self._check):
            self._compare(group, handle, halt)
        group.before += 1
        answer = self._cross(group, verb, handle)
        if self.last is not None and group is self._world:
            self.last.came(verb, answer)
        group.ended(verb)
        return answer

    def _group_of(self, verb: Shared) -> RankGroup:
        among = plain(verb, self._store.size).among
        if among is not None and len(among) == 1 and among not in self._groups:  # nothing to connect
            self._groups[among] = alone = RankGroup(among, self._store, self._fabric)
            alone.connect(Gloo(None, 0, 1))
        if among not in self._groups:
            raise ValueError(
                f"no group {listed(among or ())} on comm thread {self._lane!r}: the part that uses it must list it in `groups`"
            )
        return self._groups[among]

    def _cross(self, group: RankGroup, verb: Crossing, handle: Task) -> Any:
        began = self.watch.begin()
        self.asking = True
        try:
            answer = group.connection.answer(self._guarded(verb, group))
        except _Own as own:
            raise own.reason from None
        except RuntimeError as error:
            raise _Trouble(plainly(error)) from error
        finally:
            self.asking = False
        self._pulse.moves += 1
        per_node, name = self._parent.ledger.per_node, type(verb).__name__
        numbers = traffic(verb, self._store.rank, self._store.size, per_node)
        self.watch.end(began, partial(self._parent.note, handle.step, name, handle.label, numbers, group.among))
        return answer

    def _guarded(self, verb: Crossing, group: RankGroup) -> Crossing:
        """Separate errors and computing time of the program's callbacks from those of the network."""
        match verb:
            case AllGather(_, read) if read is not None:
                read = self.last.heard(read) if self.last is not None and group is self._world else read
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

    def _poll(self, ready: Callable[[], bool], halt: threading.Event, group: RankGroup | None = None) -> None:
        """Poll the store without a deadline; the thread that joins the program has one.

        Where ranks may be lost, one of `group` that is dead must not be waited for until its silence shows.
        """
        looked, members = time.monotonic(), self._parent.members

        def over() -> bool:
            nonlocal looked
            # The members have one flag of their own, and each shard of a model a part of the store.
            if ready() or self._fabric.flag_is_up("broken") or (members is not None and members.is_called):
                return True
            if group is not None and members is not None and time.monotonic() - looked >= _LOOK:
                group.look()
                looked = time.monotonic()
            return False

        self.asking = True
        try:
            poll(over, float("inf"), halt)
        finally:
            self.asking = False

    def _closed(self, group: RankGroup, verb: WaitQuorum, halt: threading.Event) -> TicketHolders:
        """Wait until a quorum has its tickets.

        There is no deadline here: a quorum may take as long as a step; the thread that joins the program has one.
        """
        quorum = QuorumWait(group.tickets, verb)
        group.tickets.sweep()
        self._poll(quorum.is_met, halt)
        if quorum.holders is None:
            raise _Trouble("another rank has left this comm thread")
        return TicketHolders.seen(quorum.holders, quorum.seen[: len(quorum.holders)])

    def _compare(self, group: RankGroup, handle: Task, halt: threading.Event) -> None:
        """Check that all ranks of a group are about to do the same collective.

        Done before the group's first collectives and before later ones of an unusual size: gloo aborts the process where
        sizes differ, and adds up different buckets of one size without an error.
        """
        mine, store, key = self._position(handle), group.store, f"check/{group.collectives}"
        posts = _network(lambda: read_all(store, key, self._meet_all(group, store, key, mine.write(), halt)))
        if not all(mine.agrees(store.rank, post, other) for other, post in posts.items()):
            raise _Trouble("the ranks are about to run different collectives")

    def _meet_all(
        self, group: RankGroup, store: SharedStore, key: str, text: str, halt: threading.Event
    ) -> dict[int, str]:
        """Post a text and read the texts of all other ranks."""
        posts = group.meet(store, key, text, lambda ready: self._poll(ready, halt, group))
        if len(posts) < store.size - 1:
            raise _Trouble("not all ranks have reached it")
        return posts

    def _position(self, handle: Task | None, trouble: str = "") -> CollectiveFingerprint:
        if handle is None:
            return position(0, "", self._world.collectives, None)._replace(trouble=trouble)
        number = self._asked(handle.verb).collectives
        return position(handle.step, handle.label, number, handle.verb, handle.by_itself)._replace(trouble=trouble)

    def _asked(self, verb: Verb | None) -> RankGroup:
        """The group that a request involves; all ranks for a request of no group."""
        return self._groups.get(verb.among, self._world) if isinstance(verb, Shared) else self._world

    def doomed(self, handle: Task | None, words: Mapping[int, RankStatus]) -> str:
        """Why a wait cannot succeed: a rank has left before the collective; empty if it can."""
        verb = handle.verb if handle else None
        group = self._asked(verb)
        coming, name = group.collectives + isinstance(verb, WaitQuorum), self._called(group)
        gone = {r: word for r, word in words.items() if word.state == "left" and r in group.ranks}
        away = [r for r, word in gone.items() if word.done.get(name, 0) < coming]
        match verb:
            case AllReduce() | AllGather() | AllToAll() if away:
                return "a rank has left before it"
            case WaitQuorum() if len(away) > len(group.ranks) - min([verb.count, *(n for _, n in verb.fallback)]):
                return "too few ranks are left for its quorum"
            case _:
                return ""

    def account(self, handle: Task | None, error: BaseException, inside: bool) -> BaseException:
        """Tell the others that this comm thread is lost, ask for their positions, and return the error that reports them.

        An error of the program itself is returned unchanged, without waiting for other ranks.
        """
        own = inside and not isinstance(error, _Trouble)
        reason = f"{type(error).__name__}: {plainly(error)}" if own else str(error)
        report = FailureReport(self._fabric, self._position(handle, reason), self.patience)
        # The store's host may be gone in a way that blocks its clients; this thread must not wait for them.
        asking = threading.Thread(target=report.ask, daemon=True)
        may_wait(asking, self._fabric.raw)
        asking.start()
        for group in [*self._groups.values()]:  # wakes the peers that wait for us
            group.hang_up(patience=0.0) if inside else group.tear()
        if own:
            return error
        asking.join(self.patience + (_SLOW if self._pulse.answers() else 0.5))
        handed = traffic(handle.verb, self._store.rank, self._store.size)[0] if handle and handle.verb else 0
        place = f"rank {self._store.rank} of {self._store.size}: {report.mine}, {handed} bytes"
        peer_error = PeerError(f"{place}. {report.answer(self._pulse.answers())}")
        peer_error.__cause__ = error.__cause__
        return peer_error


def _network(ask: Callable[[], Any]) -> Any:
    """Call `ask`, and count its failure as one of the network or of a peer."""
    try:
        return ask()
    except RuntimeError as error:
        raise _Trouble(plainly(error)) from error
