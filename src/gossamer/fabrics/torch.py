"""The torch fabric: answers verbs on real processes, over torch.distributed."""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
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
    Descend,
    Handle,
    Join,
    Now,
    Present,
    Program,
    Regroup,
    Start,
    Verb,
)
from gossamer.fabrics import leaving, nccl
from gossamer.fabrics.book import Meet, gloo
from gossamer.fabrics.connection import Connection
from gossamer.fabrics.driver import NetworkDriver
from gossamer.fabrics.gloo import Gloo
from gossamer.fabrics.lane import Lane, Running
from gossamer.fabrics.ledger import Entry, Ledger, Traffic
from gossamer.fabrics.members import Members
from gossamer.fabrics.paths import Path, path
from gossamer.fabrics.pulse import Patience, Pulse, Word
from gossamer.fabrics.shared_store import SharedStore
from gossamer.fabrics.staged import Staged
from gossamer.fabrics.store import default_store
from gossamer.fabrics.watch import standstill_of

T = TypeVar("T")

CPU = torch.device("cpu")
_DAY = 86_400.0  # seconds

_made = Counter[str]()  # fabrics made so far on each group, to tell their keys in the store apart


class TorchFabric:
    """Runs programs over a torch.distributed process group (None: the default group, or this process alone).

    Over `Members` as well, of whom some may die and come back: a program asks to `regroup` then. `rank` and `size` stay those
    that all began with; who asks the network is counted by its place among those who are there.

    `device` is where the tensors lie that programs give to the network, and where they find what has come.

    Every lane is a thread with a process group of its own. All ranks of the group make their fabrics, and open lanes,
    in the same order. The first `check` collectives of a lane, and later ones of an unusual size, are compared across
    ranks before they begin, so that ranks which disagree learn how instead of hanging, aborting or adding up the wrong
    things; 0 turns that off.

    A wait ends with an error when a rank has given no sign of life for `deadline` seconds, when all ranks have waited so
    long, or when one has left; a rank that lives and works elsewhere is waited for, after a warning. With
    `patience="work"` no wait is longer than the deadline.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Members | None = None,
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
            raise ValueError(f"patience is 'alive' or 'work', not {patience!r}")
        self._deadline, self._check = deadline, check
        self._patience: Patience = patience
        self._lock = threading.Lock()
        self.standstill = standstill_of(device, self._expose)
        self._members = group if isinstance(group, Members) else None
        if self._members is not None:
            self._members.enter(deadline)
        try:
            self._meet(group, ["comm"])
        except BaseException:
            self._part()
            raise

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Go on with the ranks of another group, also after a failure; None is the default group.

        What has not ended ends with an error, as when the fabric is closed. Then it is as one that is made anew, with the
        lanes, the settings and the ledger that it had: whoever was not with us makes one, and opens as many lanes. Groups of
        some ranks are to be formed again, since there are others now; ranks that do not come along close theirs.
        """
        lanes, served = [*self._lanes], self._served
        self.close()
        self._meet(group, lanes, served)

    @property
    def present(self) -> Present:
        """Who is there."""
        if self._members is None:
            return Present.all_of(self.rank, self.size)
        members = self._members
        return Present(members.place, members.epoch.ranks, members.epoch.lives, members.joins)

    @property
    def members(self) -> Members | None:
        """Who may die and come back, if any may."""
        return self._members

    def _regroup(self, failure: Exception) -> Present:
        if self._members is None:
            raise failure
        lanes, served = [*self._lanes], self._served
        while True:
            self._end()
            self._members.regroup(failure)
            try:
                self._meet(self._members, lanes, served)
                return self.present
            except PeerError as error:
                failure = error

    def _meet(
        self, group: dist.ProcessGroup | Members | None, lanes: Sequence[str], served: frozenset[str] = frozenset()
    ) -> None:
        """Come together with the ranks of a group, and open these lanes. Nothing is left of an earlier group's."""
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self.rank, self.size, self._place, self._count = _seat(group)
        self._group = group
        self._lanes = dict[str, Lane]()
        self._drivers = dict[str, NetworkDriver]()
        self._last = dict[str, weakref.ref[Running]]()  # what was started last on each lane
        self._served = frozenset[str]()  # lanes on which somebody answers whoever is first
        self.before_close: Callable[[], None] | None = None  # what is to be said to the others before the lanes end
        self._path: Path
        self._path, self._refusal = _way(group, self._count, self.device)
        self._closed = False
        self._groups = list[tuple[int, ...]]()
        self._store = self._make_store()
        theirs = None if isinstance(group, Members) else group  # the store of members goes with no rank
        self._hosts = self.size > 1 and theirs is not None and leaving.hosts_the_store()
        # Asked now, since the groups may be destroyed before this fabric is closed.
        self._keeps_store = theirs is not None and 0 in dist.get_process_group_ranks(theirs)
        vital = self._keeps_store or self._members is not None
        self._pulse = Pulse(self._store, self._deadline, self._patience, vital)
        # A thread that wakes while the interpreter is taken down aborts the process: end the lanes before.
        self._at_exit = leaving.at_exit(self.close)
        try:
            for lane in lanes:
                self.open_lane(lane, served=lane in served)
        except BaseException:
            self._end()
            raise

    def open_lane(self, name: str, served: bool = False) -> None:
        """Open another lane; all ranks do so, in the same order.

        On one that is `served` somebody answers whoever is first. NCCL cannot, so that one goes by way of the host.
        """
        if name in self._lanes:
            raise ValueError(f"there is a lane {name!r} already")
        way = self._way_of(served)
        says = (
            f"opens lane {name!r} over {way} with deadline {self._deadline:g}, patience {self._patience!r} and "
            f"check {self._check}"
        )
        if self._refusal is not None:  # which the others are told where they would else wait
            says = f"cannot go on: {self._refusal}"
        number, driver = len(self._lanes), NetworkDriver(self, name, self._store, self._pulse, self._check, self.device)
        if self._members is not None:
            driver.patience = 0.0  # who is gone is found out anyway, and then all go on
        lane = Lane(name, driver, self._pulse, self.device)
        self._drivers[name], self._lanes[name] = driver, lane
        self._served |= {name} if served else frozenset()

        def program() -> Program[None]:
            yield Compute(lambda: driver.open(number, says, partial(self._connect, way), lane.halt), says)

        try:
            self.join(self.start(program(), f"opening lane {name!r}", lane=name))
        except PeerError:
            if self._refusal is not None:
                raise self._refusal from None
            raise
        self._form(name, self._groups)

    def form(self, groups: Iterable[tuple[int, ...]], per_node: int = 1) -> None:
        """Make groups of ranks, on all lanes that there are and will be. All ranks do so, with the same groups in one order.

        From now on the ledger takes so many ranks to share a node.
        """
        self.ledger.per_node = max(per_node, self.ledger.per_node)
        if self._members is not None and (groups := [*groups]):
            raise AttachError("groups of some ranks among members(), who may die: use a recipe without them")
        new = [
            g for g in dict.fromkeys(groups) if len(g) > 1 and g != tuple(range(self.size)) and g not in self._groups
        ]
        for group in new:
            refuse_group(AllGather(torch.empty(0), among=group), group[0], self.size)
        self._groups += new
        for name in self._lanes:
            self._form(name, new)

    def _form(self, lane: str, groups: list[tuple[int, ...]]) -> None:
        driver, halt, number = self._drivers[lane], self._lanes[lane].halt, len(self._groups)

        way = self._way_of(lane in self._served)

        def program() -> Program[None]:
            make = partial(self._connect, way)
            yield Compute(lambda: driver.form(number, groups, make, halt), f"making {len(groups)} groups")

        if groups:
            self.join(self.start(program(), f"making groups on lane {lane!r}", lane=lane))

    def _way_of(self, served: bool) -> Path:
        if served and self._path == "nccl":
            return "staged"
        return self._path

    @property
    def per_node(self) -> int:
        """How many ranks share a node, as far as the ledger goes."""
        return self.ledger.per_node

    def start(self, program: Program[T], label: str = "", step: int = 0, lane: str = "comm") -> Handle[T]:
        """Put a program on a lane and go on."""
        if lane not in self._lanes:
            raise ValueError(f"no lane {lane!r}; open are {', '.join(self._lanes)}. Open it on all ranks first.")
        handle = Running(program, label, step, self._lanes[lane])
        self._last[lane] = weakref.ref(handle)
        handle.lane.put(handle)
        return handle

    def join(self, handle: Handle[T]) -> T:
        """Wait for a started program, at most as long as the deadline; its exceptions are raised here."""
        if not isinstance(handle, Running):
            raise TypeError(f"{handle!r} is no handle of this fabric")
        handle.lane.wait(handle)
        if handle.error is not None:
            raise handle.error
        if handle.order is not None:
            self.standstill.gap(*handle.order.land(handle.result))
            self._drivers[handle.lane.name].watch.settle()
        return handle.result

    def run(self, program: Program[T]) -> T:
        """Drive a program on this thread; what it asks of the network is answered on lane "comm"."""
        return drive(program, self._answer)

    def close(self) -> None:
        """End all lanes. Programs that have not ended do so with an error; a lane stuck in the backend is left.

        Others may be behind, so what was started is seen through and letters are waited for until they are read, at most
        as long as the deadline; not after a failure. The rank that hosts the store goes last, see `leaving`.
        """
        self._end()
        self._part()

    def _part(self) -> None:
        if self._members is not None:
            self._members.leave()

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        if self.before_close is not None:
            self.before_close()
        waits = self.size > 1 and self._is_whole() and leaving.in_peace()
        until = time.monotonic() + (self._deadline if waits else 0.0)
        for name, lane in self._lanes.items():
            last = self._last[name]() if name in self._last else None
            if last is not None:
                lane.see_through(last, until)
        fine = self.size > 1 and self._is_whole()
        if fine and self._hosts:
            leaving.stay_for(self._store, self._deadline)
        ended = [name for name, lane in self._lanes.items() if lane.close(patience=0.5)]
        for name in self._served - set(ended):  # it waits for a call, and callers for its answer
            self._drivers[name].tear()
        if self._pulse.close() and fine and len(ended) == len(self._lanes):
            self._say_goodbye()
        for name in ended:
            self._drivers[name].watch.settle()
            self._drivers[name].hang_up(patience=max(0.5, until - time.monotonic()))

    def _is_whole(self) -> bool:
        return all(lane.broken is None for lane in self._lanes.values())

    def _say_goodbye(self) -> None:
        """Whoever waits for this rank, or notices that it is gone, shall find a word of it. (A broken lane has told where
        it was; and its store may hold up whoever talks to it.)
        """
        done = {key: count for driver in self._drivers.values() for key, count in driver.done().items()}
        with suppress(RuntimeError):  # the store's host may be gone already
            self._store.raise_flag(f"pulse/{self.rank}", Word(0, "left", done).write())
            for driver in self._drivers.values():
                driver.clear_up()
            leaving.sign_off(self._store, self._keeps_store and leaving.somebody_stays())

    def note(self, step: int, verb: str, label: str, numbers: Traffic, among: Among, seconds: float) -> int:
        """Write an answered request into the ledger; lanes share it."""
        with self._lock:
            handed, sent, received, inside = numbers
            return self.ledger.note(Entry(step, self.rank, verb, label, handed, sent, received, seconds, inside, among))

    def amend(self, place: int, seconds: float) -> None:
        """It is known how long a request took."""
        with self._lock:
            self.ledger.amend(place, seconds)

    def busy(self, seconds: float) -> None:
        """Processor time that a program took on its lane: encoding and decoding, in the main."""
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
                return self._regroup(failure)
            case Descend():
                raise RuntimeError("Descend is for a host to answer: it knows the optimizer, a fabric does not")
            case _:
                return self.join(self.start(_alone(verb)))

    def _make_store(self) -> SharedStore:
        if self._group is None:
            return SharedStore.alone()
        if isinstance(self._group, Members):
            return self._group.meeting
        ranks = dist.get_process_group_ranks(self._group)
        name = f"gossamer/{self._group.group_name}/{ranks[0]}"
        _made[name] += 1
        store = default_store()
        return SharedStore(store, self.rank, self.size).under(f"{name}/{_made[name]}")

    def _connect(self, way: Path, meet: Meet, among: Among) -> Connection:
        """A lane's own connection of these ranks; all of them have come to make it."""
        if self._refusal is not None:
            raise self._refusal
        ranks = range(self._count) if among is None else among
        rank, size, device = ranks.index(self._place), len(ranks), self.device
        if self._group is None or way == "alone":
            return Gloo(None, rank, size)
        if way == "nccl" and not isinstance(self._group, Members):
            if among is None:
                where = nccl.card_of(device)
                nccl.refuse_shared({rank: where} | meet(where))
            # A rank that lives is waited for, of which NCCL's watchdog knows nothing.
            deadline = self._deadline if self._patience == "work" else max(self._deadline, _DAY)
            everyone = dist.get_process_group_ranks(self._group)
            group = nccl.new_group([everyone[r] for r in ranks], size, deadline, device)
            return nccl.Nccl(group, rank, size, device)
        group = gloo(meet, rank, size, self._deadline)
        return Gloo(group, rank, size) if way == "gloo" else Staged(group, rank, size, device)


def _seat(group: dist.ProcessGroup | Members | None) -> tuple[int, int, int, int]:
    """This process's rank, how many there are; its place among those who are there, and how many those are."""
    if isinstance(group, Members):
        return group.rank, group.size, group.place, len(group.epoch.ranks)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    return rank, size, rank, size


def _way(group: dist.ProcessGroup | Members | None, size: int, device: torch.device) -> tuple[Path, AttachError | None]:
    """Which way tensors go; where there is none, why. It is an error once the others have been told."""
    try:
        return path(group, size, device), None
    except AttachError as refusal:
        return "alone", refusal


def _alone(verb: Verb) -> Program[Any]:
    return (yield verb)
