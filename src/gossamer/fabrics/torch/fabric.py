"""The torch fabric: answers verbs on real processes, over torch.distributed."""

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist

from gossamer.core.errors import AttachError, PeerError
from gossamer.core.groups import refuse_group
from gossamer.core.programs import drive
from gossamer.core.verbs import (
    AllGather,
    Among,
    Compute,
    Handle,
    Join,
    MembersLeave,
    Now,
    OptimizerStep,
    Present,
    Program,
    Regroup,
    Start,
    Verb,
)
from gossamer.costs.crossing import Traffic
from gossamer.fabrics.ledger import Ledger, LedgerEntry
from gossamer.fabrics.liveness import shutdown
from gossamer.fabrics.liveness.heartbeat import Heartbeat, Patience, RankStatus
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.notice import Notice
from gossamer.fabrics.liveness.store import SharedStore
from gossamer.fabrics.torch.comm_thread import CommThread, Task
from gossamer.fabrics.torch.driver import NetworkDriver
from gossamer.fabrics.torch.endpoint import Crowd, Endpoint, Timeouts
from gossamer.fabrics.torch.last_collective import LastCollective
from gossamer.fabrics.torch.reunion import Reunion
from gossamer.fabrics.torch.timers import exposed_time_of

T = TypeVar("T")
GroupsOf = Callable[[int], Iterable[tuple[int, ...]]]  # the groups that a recipe needs among so many ranks

CPU = torch.device("cpu")


class TorchFabric:
    """Runs programs over a torch.distributed process group (None: the default group, or this process alone).

    It also takes `Members`, of which some may die and come back: then a program may yield `Regroup`. `rank` is that of its seat
    and `size` the number of seats; collectives count ranks by their index among the present members.

    `device` is the device of the tensors that programs send and receive.

    Every comm thread (`lane`) has a process group of its own. All ranks of the group create their fabrics, and open comm
    threads, in the same order. The first `check` collectives of a comm thread, and later ones of an unusual size, are
    compared across ranks before they begin: ranks that disagree get an error that says how, instead of hanging, aborting
    or adding up the wrong tensors. `check=0` turns that off.

    A wait ends with an error when a rank has sent no heartbeat for `deadline` seconds, when all ranks have waited for that
    long, or when one has left. After a warning, a rank that is alive and busy elsewhere is waited for. With
    `patience="work"` no wait is longer than the deadline.
    """

    def __init__(
        self,
        group: Crowd = None,
        *,
        deadline: float = 300.0,
        patience: Patience = "alive",
        ledger: Ledger | None = None,
        check: int = 8,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.ledger = Ledger() if ledger is None else ledger
        if patience not in get_args(Patience):
            raise ValueError(f"patience must be 'alive' or 'work', got {patience!r}")
        self._waits, self._check = Timeouts(deadline, patience), check
        self._lock = threading.Lock()
        self._errand: tuple[str, int] | None = None  # purpose and step of requests outside of a started program
        self.standstill = exposed_time_of(device, self._expose)
        self._groups_of: GroupsOf = no_groups
        self.members = group if isinstance(group, Members) else None
        self.reunion = None if self.members is None else Reunion(self)  # how they meet again by themselves
        if self.members is not None:
            self.members.enter(deadline)
        try:
            with self._regrouping():
                self._meet(group, ["comm"])
        except BaseException:
            self._part()
            raise

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Continue with the ranks of another group, also after a failure; None is the default group.

        Programs that have not ended end with an error, as in `close`. Then the fabric is as a new one with the same comm
        threads, settings and ledger. A rank that was not in the old group creates a fabric and opens as many comm threads; a
        rank that is not in the new group closes its fabric. Groups of some ranks must be formed again.
        """
        lanes, served = [*self._lanes], self._served
        self.close()
        self._meet(group, lanes, served)

    @property
    def present(self) -> Present:
        """The present ranks."""
        if self.members is None:
            return Present.all_of(self.rank, self.size)
        members = self.members
        there = members.present
        return Present(members.place, there.ranks, there.lives, members.joins, members.weights)

    @property
    def place(self) -> int:
        """The number of this rank, or under members of its node, from the start."""
        members = self.members
        return self.rank if members is None or not members.by_shard else self.rank // members.node.size

    @property
    def group(self) -> Crowd:
        """The process group, or the members; None for this process alone."""
        return self._seat.group

    def last_on(self, lane: str) -> LastCollective | None:
        """The last collective of a comm thread, where that is kept."""
        return self._drivers[lane].last

    @property
    def drivers(self) -> list[NetworkDriver]:
        return [*self._drivers.values()]

    def is_open(self, lane: CommThread) -> bool:
        """True if this is a comm thread of this generation."""
        return self._lanes.get(lane.name) is lane

    def regroup(self, failure: Exception) -> Present:
        """Connect to the members that are present; raises `failure` if that does not help."""
        if self.members is None:
            raise failure
        lanes, served = [*self._lanes], self._served
        if isinstance(failure, MembersLeave):
            self.members.announce(failure)
        while True:
            self._end()
            self.members.regroup(failure)
            try:
                self._meet(self.members, lanes, served)
                return self.present
            except PeerError as error:
                failure = error

    @contextmanager
    def _regrouping(self) -> Generator[None]:
        """Regroup after a failure, in place of a rank that has just come; where all start together, it is raised."""
        try:
            yield
        except PeerError as failure:
            if self.members is None or not self.members.joins:
                raise
            self.regroup(failure)

    def _wake(self) -> None:
        """End all collectives under way with an error, from any thread."""
        for driver in [*self._drivers.values()]:
            driver.tear()

    def _meet(self, group: Crowd, lanes: Sequence[str], served: frozenset[str] = frozenset()) -> None:
        """Connect to the ranks of a group, and open these comm threads. Nothing is kept of an earlier group."""
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        seat = self._seat = Endpoint.in_group(group, self.device)
        self.rank, self.size = seat.rank, seat.size
        self._lanes = dict[str, CommThread]()
        self._drivers = dict[str, NetworkDriver]()
        self._last = dict[str, weakref.ref[Task]]()  # the last task of each comm thread
        self._served = frozenset[str]()  # comm threads that receive from any rank
        self.before_close: Callable[[], None] | None = None  # called before the comm threads end
        if self.members is not None:
            self.members.wake = self._wake
        self._closed = False
        self._groups = self._new_groups(self._groups_of(seat.count), [])
        self._store = seat.make_store()
        # Asked now, since the groups may be destroyed before this fabric is closed.
        self._hosts, self._keeps_store = seat.hosts_the_store, seat.keeps_the_store
        vital = self._keeps_store or self.members is not None
        self._pulse = Heartbeat(self._store, *self._waits, vital)
        # A thread that wakes while the interpreter shuts down aborts the process: end the comm threads before.
        self._at_exit = shutdown.at_exit(self.close)
        try:
            for lane in lanes:
                self._open_lane(lane, served=lane in served)
        except BaseException:
            self._end()
            raise

    def watch_for_notice(self, everyone: SharedStore | None = None) -> Notice:
        """What agrees with the other ranks, or with `everyone`, on the step after which all stop, once one of them is told to."""
        return Notice(self._pulse, everyone)

    def has_lane(self, name: str) -> bool:
        return name in self._lanes

    def open_lane(self, name: str, served: bool = False) -> None:
        """Open another comm thread; all ranks call this, in the same order.

        With `served`, programs on it may receive from any rank. NCCL cannot, so its tensors go through the host's memory.
        """
        if name in self._lanes:
            raise ValueError(f"comm thread {name!r} is open already: choose another name")
        with self._regrouping():
            self._open_lane(name, served)

    def _open_lane(self, name: str, served: bool) -> None:
        way, refusal, (deadline, patience) = self._seat.way(served), self._seat.refusal, self._waits
        says = (
            f"opens comm thread {name!r} over {way} with deadline {deadline:g}, patience {patience!r} and "
            f"check {self._check}"
        )
        if refusal is not None:  # tell the others, which would wait otherwise
            says = f"cannot start: {refusal}"
        number, driver = len(self._lanes), NetworkDriver(self, name, self._store, self._pulse, self._check, self.device)
        if self.members is not None:
            driver.patience, driver.outlives = 0.0, True  # lost ranks are found, and the others continue
            driver.last = None if self.reunion is None else self.reunion.listener()
        lane = CommThread(name, driver, self._pulse, self.device)
        self._drivers[name], self._lanes[name] = driver, lane
        self._served |= {name} if served else frozenset()

        connect = partial(driver.open, number, says, partial(self._seat.connect, way, self._waits), lane.halt)
        try:
            self._together(name, f"opening comm thread {name!r}", Compute(connect, says))
        except PeerError:
            if refusal is not None:
                raise refusal from None
            raise
        self._form(name, self._groups)

    def form(self, groups: Iterable[tuple[int, ...]], per_node: int = 1) -> None:
        """Connect groups of ranks, on all present and later comm threads; all ranks pass the same groups in the same order.

        From now on the ledger counts `per_node` ranks per node.
        """
        self.ledger.per_node = max(per_node, self.ledger.per_node)
        new = self._new_groups(groups, self._groups)
        for group in new:
            refuse_group(AllGather(torch.empty(0, dtype=torch.float32), among=group), group[0], self._seat.count)
        self._groups += new
        with self._regrouping():
            for name in self._lanes:
                self._form(name, new)

    def form_always(self, groups_of: GroupsOf, per_node: int) -> None:
        """Connect the groups of so many ranks, and again whenever members have come or gone."""
        groups = [*groups_of(self._seat.count)]
        if self.members is not None and groups and self.members.node.size != per_node:
            raise AttachError(
                f"the recipe needs groups of some ranks ({per_node} on each node), and here {self.members.node.size} of a node come and go "
                "together: use a recipe without groups, or start each node by a torchrun of its own, and attach with nodes='members'"
            )
        self._groups_of = groups_of
        self.form(groups, per_node)

    def _new_groups(self, groups: Iterable[tuple[int, ...]], known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Groups that have to be connected: of several ranks and not of all, nor known."""
        everybody = tuple(range(self._seat.count))
        return [g for g in dict.fromkeys(groups) if len(g) > 1 and g != everybody and g not in known]

    def _form(self, lane: str, groups: list[tuple[int, ...]]) -> None:
        driver, halt, number = self._drivers[lane], self._lanes[lane].halt, len(self._groups)
        make = partial(self._seat.connect, self._seat.way(lane in self._served), self._waits)

        if groups:
            work = Compute(partial(driver.form, number, groups, make, halt), f"making {len(groups)} groups")
            self._together(lane, f"making groups on comm thread {lane!r}", work)

    def _together(self, lane: str, label: str, work: Compute) -> None:
        """Do on a comm thread what all ranks do together."""
        self.join(self.start(_alone(work), label, lane=lane))

    @property
    def per_node(self) -> int:
        """Number of ranks per node, as counted by the ledger."""
        return self.ledger.per_node

    def start(self, program: Program[T], label: str = "", step: int = 0, lane: str = "comm") -> Handle[T]:
        """Start a program on a comm thread, and return its handle without waiting."""
        return self._put(program, label, step, lane)

    def _put(self, program: Program[T], label: str, step: int, lane: str, by_itself: bool = False) -> Handle[T]:
        if lane not in self._lanes:
            raise ValueError(
                f"comm thread {lane!r} is not open; open are {', '.join(self._lanes)}. Call open_lane({lane!r}) on all ranks "
                "first"
            )
        handle = Task(program, label, step, self._lanes[lane], by_itself)
        self._last[lane] = weakref.ref(handle)
        handle.lane.put(handle)
        return handle

    def join(self, handle: Handle[T]) -> T:
        """Wait for a started program and return its result; its exceptions are raised here."""
        if not isinstance(handle, Task):
            raise TypeError(f"join() takes a handle that start() of this fabric returned, got {handle!r}")
        handle.lane.wait(handle)
        if handle.error is not None and self.reunion is not None:
            self.reunion.after(handle)
        if handle.error is not None:
            raise handle.error
        if handle.order is not None:
            self.standstill.gap(*handle.order.land(handle.result))
            self._drivers[handle.lane.name].watch.settle()
        return handle.result

    def run(self, program: Program[T], errand: str = "", step: int = 0) -> T:
        """Run a program on this thread; its network requests run on comm thread "comm", labelled with `errand`."""
        with self.during(errand, step) if errand else nullcontext():
            return drive(program, self._answer)

    @contextmanager
    def during(self, errand: str, step: int) -> Generator[None]:
        """Label the network requests of `run` in this context with a purpose and a step, for errors and the ledger.

        In nested contexts the outer label stays: the consensus that `checkpoint.save` runs is labelled as the save.
        """
        before = self._errand
        self._errand = before or (errand, step)
        try:
            yield
        finally:
            self._errand = before

    def close(self) -> None:
        """End all comm threads. Programs that have not ended get an error; a thread stuck in the backend is left.

        Other ranks may be behind, so without a failure this waits for started programs to end and for sent messages to be
        read, at most as long as the deadline. The rank that hosts the store ends last, see `shutdown`.
        """
        self._end()
        self._part()

    def _part(self) -> None:
        if self.members is not None:
            self.members.leave()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        if self.before_close is not None:
            self.before_close()
        waits = self.size > 1 and self._is_whole() and shutdown.without_failure()
        until = time.monotonic() + (self._waits.deadline if waits else 0.0)
        for name, lane in self._lanes.items():
            last = self._last[name]() if name in self._last else None
            if last is not None:
                lane.see_through(last, until)
        fine = self.size > 1 and self._is_whole()
        if fine and self._hosts:
            shutdown.stay_for(self._store, self._waits.deadline)
        ended = [name for name, lane in self._lanes.items() if lane.close(0.5, self._break_off(name))]
        for name in self._served - set(ended):  # it waits for a request, and other ranks for its answer
            self._drivers[name].tear()
        if self._pulse.close() and fine and len(ended) == len(self._lanes):
            self._say_goodbye()
        for name in ended:
            self._drivers[name].watch.settle()
            self._drivers[name].hang_up(patience=max(0.5, until - time.monotonic()))

    def _break_off(self, lane: str) -> Callable[[], None] | None:
        """How a comm thread is stopped in the midst of a program, where that may be driven on."""
        return self._drivers[lane].tear if self.reunion is not None and self._drivers[lane].last is not None else None

    def _is_whole(self) -> bool:
        return all(lane.broken is None for lane in self._lanes.values())

    def _say_goodbye(self) -> None:
        """Write to the store that this rank has left, for ranks that wait for it.

        Not called after a failure: then the comm thread has reported its position, and the store may not answer.
        """
        done = {key: count for driver in self._drivers.values() for key, count in driver.done().items()}
        with suppress(RuntimeError):  # the store's host may be gone already
            self._store.raise_flag(f"pulse/{self.rank}", RankStatus(0, "left", done).write())
            for driver in self._drivers.values():
                driver.clear_up()
            left = [key for driver in self._drivers.values() for key in driver.left()]
            shutdown.delete_farewells(self._store, left, self._keeps_store and shutdown.has_store_host())

    def note(self, step: int, verb: str, label: str, numbers: Traffic, among: Among, seconds: float) -> int:
        """Write an answered request into the ledger; comm threads share it."""
        with self._lock:
            handed, sent, received, inside = numbers
            return self.ledger.note(
                LedgerEntry(step, self.rank, verb, label, handed, sent, received, seconds, inside, among)
            )

    def amend(self, place: int, seconds: float) -> None:
        """Set the seconds of a request that was noted before it ended."""
        with self._lock:
            self.ledger.amend(place, seconds)

    def busy(self, seconds: float) -> None:
        """Add processor time of a program on its comm thread: mainly encoding and decoding."""
        with self._lock:
            self.ledger.busy_seconds += seconds

    def _expose(self, seconds: float) -> None:
        self.ledger.exposed_seconds += seconds

    def _answer(self, verb: Verb) -> Any:
        match verb:
            case Start(program, label, step, lane):
                return self.start(program, label, step, lane)
            case Join(handle):
                return self.join(handle)
            case Compute(work):
                return work()
            case Now():
                return time.monotonic()
            case Regroup(failure):
                return self.regroup(failure)
            case OptimizerStep():
                raise RuntimeError(
                    "a fabric cannot answer OptimizerStep, since it does not know the optimizer: run the program through an "
                    "integration (gossamer.attach)"
                )
            case _:
                return self.join(self._put(_alone(verb), *(self._errand or ("", 0)), "comm", by_itself=True))


def no_groups(size: int) -> Iterable[tuple[int, ...]]:
    """Of a recipe in which all ranks talk to all."""
    return ()


def _alone(verb: Verb) -> Program[Any]:
    return (yield verb)
