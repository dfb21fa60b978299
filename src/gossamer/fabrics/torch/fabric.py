"""The torch fabric: answers verbs on real processes, over torch.distributed."""

import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist

from gossamer.core.errors import AttachError, PeerError
from gossamer.core.programs import drive, single
from gossamer.core.verbs import (
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
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.notice import Notice
from gossamer.fabrics.liveness.store import SharedStore
from gossamer.fabrics.torch.comm_thread import Task
from gossamer.fabrics.torch.endpoint import Crowd, Timeouts
from gossamer.fabrics.torch.reunion import Reunion
from gossamer.fabrics.torch.session import FabricSession
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
        self.groups_of: GroupsOf = lambda size: ()  # until a recipe needs some
        self.members = group if isinstance(group, Members) else None
        self.reunion = None if self.members is None else Reunion(self)  # how they meet again by themselves
        if self.members is not None:
            self.members.enter(deadline)
        try:
            with self._regrouping():
                self._meet(group, {"comm": False})
        except BaseException:
            self._part()
            raise

    def renew(self, group: dist.ProcessGroup | None = None) -> None:
        """Continue with the ranks of another group, also after a failure; None is the default group.

        Programs that have not ended end with an error, as in `close`. Then the fabric is as a new one with the same comm
        threads, settings and ledger. A rank that was not in the old group creates a fabric and opens as many comm threads; a
        rank that is not in the new group closes its fabric. Groups of some ranks must be formed again.
        """
        lanes = self._open_lanes()
        self.close()
        self._meet(group, lanes)

    @property
    def present(self) -> Present:
        if self.members is None:
            return Present.all_of(self.rank, self.size)
        members = self.members
        there = members.present
        return Present(members.place, there.ranks, there.lives, members.joins, members.weights)

    @property
    def generation(self) -> int:
        """The number of this generation of members, as each change of them begins another; 0 without members."""
        return 0 if self.members is None else self.members.epoch.number

    @property
    def place(self) -> int:
        """The number of this rank, or under members of its node, from the start."""
        members = self.members
        return self.rank if members is None or not members.by_shard else self.rank // members.node.size

    def regroup(self, failure: Exception) -> Present:
        """Connect to the members that are present; raises `failure` if that does not help."""
        if self.members is None:
            raise failure
        lanes, began, late = self._open_lanes(), time.monotonic(), self._waits.deadline
        if isinstance(failure, MembersLeave):
            self.members.announce(failure)
        while True:
            self.session.end()
            self.members.regroup(failure)
            try:
                self._meet(self.members, lanes)
                return self.present
            except PeerError as error:
                failure = error
            if (waited := time.monotonic() - began) >= late:  # one that hangs and has a heartbeat is a member still
                late, so = 2 * waited, f"ranks {self.members.present.ranks} have not met again for {waited:.0f} seconds"
                warnings.warn(f"rank {self.members.rank}: {so}: {failure}", RuntimeWarning, stacklevel=2)

    @contextmanager
    def _regrouping(self) -> Generator[None]:
        """Regroup after a failure, in place of a rank that has just come; where all start together, it is raised."""
        try:
            yield
        except PeerError as failure:
            if self.members is None or not self.members.joins:
                raise
            self.regroup(failure)

    def _open_lanes(self) -> dict[str, bool]:
        """The names of the comm threads, and whether each is served."""
        return {name: lane.served for name, lane in self.session.lanes.items()}

    def _meet(self, group: Crowd, lanes: Mapping[str, bool]) -> None:
        """Connect to the ranks of a group, and open these comm threads. Nothing is kept of an earlier group."""
        self.before_close: Callable[[], None] | None = None  # called before the comm threads end
        session = self.session = FabricSession(self, group, self._waits, self._check)
        self.rank, self.size = session.endpoint.rank, session.endpoint.size
        if self.members is not None:
            self.members.wake = session.tear
        try:
            for name, served in lanes.items():
                session.open(name, served)
        except BaseException:
            self.session.end()
            raise

    def watch_for_notice(self, everyone: SharedStore | None = None) -> Notice:
        """What agrees with the other ranks, or with `everyone`, on the step after which all stop, once one of them is told to."""
        return Notice(self.session.pulse, everyone)

    def has_lane(self, name: str) -> bool:
        return name in self.session.lanes

    def open_lane(self, name: str, served: bool = False) -> None:
        """Open another comm thread; all ranks call this, in the same order.

        With `served`, programs on it may receive from any rank. NCCL cannot, so its tensors go through the host's memory.
        """
        if self.has_lane(name):
            raise ValueError(f"comm thread {name!r} is open already: choose another name")
        with self._regrouping():
            self.session.open(name, served)

    def form(self, groups: Iterable[tuple[int, ...]], per_node: int = 1) -> None:
        """Connect groups of ranks, on all present and later comm threads; all ranks pass the same groups in the same order.

        From now on the ledger counts `per_node` ranks per node.
        """
        self.ledger.per_node = max(per_node, self.ledger.per_node)
        with self._regrouping():
            self.session.form(groups)

    def form_always(self, groups_of: GroupsOf, per_node: int) -> None:
        """Connect the groups of so many ranks, and again whenever members have come or gone."""
        groups = [*groups_of(self.session.endpoint.count)]
        if self.members is not None and groups and self.members.node.size != per_node:
            raise AttachError(
                f"the recipe needs groups of some ranks ({per_node} on each node), and here {self.members.node.size} of a node come and go "
                "together: use a recipe without groups, or start each node by a torchrun of its own, and attach with nodes='members'"
            )
        self.groups_of = groups_of
        self.form(groups, per_node)

    def start(self, program: Program[T], label: str = "", step: int = 0, lane: str = "comm") -> Handle[T]:
        """Start a program on a comm thread, and return its handle without waiting."""
        return self.session.put(program, label, step, lane)

    def join(self, handle: Handle[T]) -> T:
        """Wait for a started program and return its result; its exceptions are raised here."""
        if not isinstance(handle, Task):
            raise TypeError(f"join() takes a handle that start() of this fabric returned, got {handle!r}")
        if handle.order is not None:
            handle.order.await_it()
        handle.lane.wait(handle)
        if handle.error is not None and self.reunion is not None:
            self.reunion.after(handle)
        if handle.error is not None:
            raise handle.error
        if handle.order is not None:
            self.standstill.gap(*handle.order.land(handle.result))
            self.session.lanes[handle.lane.name].driver.watch.settle()
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
        self.session.end()
        self._part()

    def _part(self) -> None:
        if self.members is not None:
            self.members.leave()

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
                return self.join(self.session.put(single(verb), *(self._errand or ("", 0)), "comm", by_itself=True))
