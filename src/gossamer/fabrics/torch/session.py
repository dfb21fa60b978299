"""One set of ranks that a fabric is connected to, from when they meet until they part: their comm threads, store and heartbeat."""

import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gossamer.core.errors import PeerError
from gossamer.core.groups import refuse_group
from gossamer.core.programs import single
from gossamer.core.verbs import AllGather, Compute, Program
from gossamer.fabrics.liveness import shutdown
from gossamer.fabrics.liveness.heartbeat import Heartbeat, RankStatus
from gossamer.fabrics.torch.comm_thread import CommThread, Task
from gossamer.fabrics.torch.driver import Make, NetworkDriver
from gossamer.fabrics.torch.endpoint import Crowd, Endpoint, Timeouts

if TYPE_CHECKING:
    from gossamer.fabrics.torch.fabric import TorchFabric


@dataclass(eq=False)
class OpenLane:
    """A comm thread that is open. It is `served` if its programs may receive from any rank."""

    thread: CommThread
    driver: NetworkDriver
    served: bool
    last: weakref.ref[Task] | None = None  # the task that was put on it last


class FabricSession:
    """Opens comm threads and groups of ranks, takes tasks, and ends all of it without a failure on any rank."""

    def __init__(self, fabric: "TorchFabric", group: Crowd, waits: Timeouts, check: int) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        self._fabric, self._waits, self._check = fabric, waits, check
        endpoint = self.endpoint = Endpoint.in_group(group, fabric.device)
        self.lanes = dict[str, OpenLane]()
        self._closed = False
        self._groups = self._unknown(fabric.groups_of(endpoint.count), [])
        self._store = endpoint.make_store()
        # Asked now, since the groups may be destroyed before this session ends.
        self._hosts, self._keeps_store = endpoint.hosts_the_store, endpoint.keeps_the_store
        self.pulse = Heartbeat(self._store, *waits, vital=self._keeps_store or fabric.members is not None)
        # A thread that wakes while the interpreter shuts down aborts the process: end the comm threads before.
        self._at_exit = shutdown.at_exit(fabric.close)

    # -- comm threads and groups -----------------------------------------------------------------------------------------

    def open(self, name: str, served: bool) -> None:
        """Open a comm thread; all ranks call this, in the same order."""
        fabric, refusal, (deadline, patience) = self._fabric, self.endpoint.refusal, self._waits
        says = (
            f"opens comm thread {name!r} over {self.endpoint.way(served)} with deadline {deadline:g}, patience {patience!r} and "
            f"check {self._check}"
        )
        if refusal is not None:  # tell the others, which would wait otherwise
            says = f"cannot start: {refusal}"
        number = len(self.lanes)
        driver = NetworkDriver(fabric, name, self._store, self.pulse, self._check, fabric.device)
        if fabric.reunion is not None:
            driver.patience = 0.0  # lost ranks are found, and the others continue
            driver.last = fabric.reunion.listener()
        lane = OpenLane(CommThread(name, driver, self.pulse, fabric.device), driver, served)
        self.lanes[name] = lane
        connect = partial(driver.open, number, says, self._make(served), lane.thread.halt)
        try:
            self._together(name, f"opening comm thread {name!r}", Compute(connect, says))
        except PeerError:
            if refusal is not None:
                raise refusal from None
            raise
        self._form(name, self._groups)

    def form(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Connect groups of ranks on all comm threads, and on those that are opened later; all ranks call this."""
        new = self._unknown(groups, self._groups)
        for group in new:
            refuse_group(AllGather(torch.empty(0, dtype=torch.float32), among=group), group[0], self.endpoint.count)
        self._groups += new
        for name in self.lanes:
            self._form(name, new)

    def _unknown(self, groups: Iterable[tuple[int, ...]], known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Groups that have to be connected: of several ranks and not of all, nor known."""
        everybody = tuple(range(self.endpoint.count))
        return [g for g in dict.fromkeys(groups) if len(g) > 1 and g != everybody and g not in known]

    def _form(self, name: str, groups: list[tuple[int, ...]]) -> None:
        if groups:
            lane = self.lanes[name]
            make = partial(lane.driver.form, len(self._groups), groups, self._make(lane.served), lane.thread.halt)
            work = Compute(make, f"making {len(groups)} groups")
            self._together(name, f"making groups on comm thread {name!r}", work)

    def _make(self, served: bool) -> Make:
        return partial(self.endpoint.connect, self.endpoint.way(served), self._waits)

    def _together(self, name: str, label: str, work: Compute) -> None:
        """Do on a comm thread what all ranks do together."""
        self._fabric.join(self.put(single(work), label, 0, name))

    def put(self, program: Program[Any], label: str, step: int, name: str, by_itself: bool = False) -> Task:
        """Start a program on a comm thread."""
        if name not in self.lanes:
            raise ValueError(
                f"comm thread {name!r} is not open; open are {', '.join(self.lanes)}. Call open_lane({name!r}) on all ranks first"
            )
        lane = self.lanes[name]
        task = Task(program, label, step, lane.thread, by_itself)
        lane.last = weakref.ref(task)
        lane.thread.put(task)
        return task

    def holds(self, thread: CommThread) -> bool:
        """True if this is one of its comm threads."""
        return thread.name in self.lanes and self.lanes[thread.name].thread is thread

    # -- the end ---------------------------------------------------------------------------------------------------------

    def tear(self) -> None:
        """End all collectives under way with an error, from any thread."""
        for lane in [*self.lanes.values()]:
            lane.driver.tear()

    def end(self) -> None:
        """End all comm threads; see `TorchFabric.close`."""
        if self._closed:
            return
        self._closed = True
        self._at_exit.cancel()
        if self._fabric.before_close is not None:
            self._fabric.before_close()
        waits = self.endpoint.size > 1 and self._is_whole() and shutdown.without_failure()
        until = time.monotonic() + (self._waits.deadline if waits else 0.0)
        for lane in self.lanes.values():
            last = None if lane.last is None else lane.last()
            if last is not None:
                lane.thread.see_through(last, until)
        fine = self.endpoint.size > 1 and self._is_whole()
        if fine and self._hosts:
            shutdown.stay_for(self._store, self._waits.deadline)
        ended = [lane for lane in self.lanes.values() if self._close(lane)]
        for lane in self.lanes.values():
            if lane.served and lane not in ended:  # it waits for a request, and other ranks for its answer
                lane.driver.tear()
        if self.pulse.close() and fine and len(ended) == len(self.lanes):
            self._say_goodbye()
        for lane in ended:
            lane.driver.watch.settle()
            lane.driver.hang_up(patience=max(0.5, until - time.monotonic()))

    def _close(self, lane: OpenLane) -> bool:
        """End a comm thread, in the midst of a program where that may be driven on; False if it is stuck."""
        return lane.thread.close(0.5, None if lane.driver.last is None else lane.driver.tear)

    def _is_whole(self) -> bool:
        return all(lane.thread.broken is None for lane in self.lanes.values())

    def _say_goodbye(self) -> None:
        """Write to the store that this rank has left, for ranks that wait for it.

        Not called after a failure: then the comm thread has reported its position, and the store may not answer.
        """
        drivers = [lane.driver for lane in self.lanes.values()]
        done = {key: count for driver in drivers for key, count in driver.done().items()}
        with suppress(RuntimeError):  # the store's host may be gone already
            self._store.raise_flag(f"pulse/{self.endpoint.rank}", RankStatus(0, "left", done).write())
            for driver in drivers:
                driver.clear_up()
            left = [key for driver in drivers for key in driver.left()]
            shutdown.delete_farewells(self._store, left, self._keeps_store and shutdown.has_store_host())
