"""A lane: one thread that drives started programs, one after the other, each to its end."""

import queue
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch

from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Handle, Program, Verb, WaitQuorum
from gossamer.fabrics.heartbeat import Heartbeat, RankStatus, WaitMonitor, ranks
from gossamer.fabrics.shared_store import poll
from gossamer.fabrics.stream import StreamOrder, settle_on


class Task(Handle[Any]):
    """A started program: waiting in its lane, under way, or ended with a result or an error.

    One `by_itself` is a single request, which the training loop asks for where it stands.
    """

    def __init__(
        self, program: Program[Any], label: str, step: int, lane: "CommThread", by_itself: bool = False
    ) -> None:
        self.by_itself = by_itself
        self.program, self.label, self.step, self.lane = program, label, step, lane
        self.order = StreamOrder.of(program, lane.device)
        self.verb: Verb | None = None  # what it waits for
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.began = time.monotonic()

    def done(self) -> bool:
        return self.arrives(0.0)

    def failed(self) -> bool:
        return self.ended.is_set() and self.error is not None

    def overdue(self) -> bool:
        return not self.ended.is_set() and time.monotonic() - self.began >= self.lane.deadline

    def arrives(self, seconds: float) -> bool:
        """Wait for its end, and for what it has left to a GPU, no longer than this; False if time was too short."""
        until = time.monotonic() + seconds
        if not self.ended.wait(seconds):
            return False
        return self.order is None or self.error is not None or self.order.arrives(until - time.monotonic())

    def end(self, result: Any, error: BaseException | None) -> None:
        if not self.ended.is_set():  # the first word counts: a lane given up may come back later
            self.result, self.error = result, error
            self.ended.set()

    def give_up(self, error: BaseException) -> None:
        """It may have ended, and left a GPU waiting for a peer."""
        self.error = self.error or error
        self.ended.set()


class Driver(Protocol):
    """What does a lane's work: runs a program, and finds out about a failure."""

    asking: bool  # of others, on the network; else the program computes

    def drive(self, handle: Task, halt: threading.Event) -> Any: ...
    def account(self, handle: Task | None, error: BaseException, inside: bool) -> BaseException: ...
    def doomed(self, handle: Task | None, words: Mapping[int, RankStatus]) -> str: ...
    def hang_up(self, patience: float = 0.0) -> None: ...


class CommThread:
    """Runs programs in the order they come in.

    The first failure breaks a lane for good: after it the ranks would no longer agree on which collective is next, and
    a reduction could pair up with the wrong one without a word.
    """

    def __init__(self, name: str, driver: Driver, pulse: Heartbeat, device: torch.device) -> None:
        self.name, self.device = name, device
        self.broken: BaseException | None = None
        self._driver, self._pulse = driver, pulse
        self._queue = queue.SimpleQueue[Task | None]()
        self._now: Task | None = None
        self._lock = threading.Lock()
        self._failing = False
        self.halt = threading.Event()  # set once the lane is broken or closed, so that nobody polls on
        self._thread = threading.Thread(target=self._work, name=f"gossamer-{name}", daemon=True)
        self._thread.start()

    @property
    def deadline(self) -> float:
        return self._pulse.deadline

    def put(self, handle: Task) -> None:
        with self._lock:
            if self.broken is None:
                self._queue.put(handle)
                return
        handle.end(None, self.broken)

    def wait(self, handle: Task) -> None:
        """Wait until a handle has ended; where there is no more hope, give the lane up, so that it ends with an error."""
        if not handle.done():
            self._wait(handle)
        if self._failing and handle.order is not None:  # a GPU does not tell what it had done from what was cut short
            self.halt.wait(3.0)
            handle.give_up(self.broken or self._stuck())

    def _wait(self, handle: Task) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(f"lane {self.name!r} joins {handle.label!r}, which waits behind it: a deadlock")
        if handle.arrives(self._pulse.soon):
            return
        with self._pulse.monitor(lambda: self._asks_for(handle)) as vigil:
            while not handle.arrives(self._pulse.often):
                if verdict := vigil.verdict(lambda words: self._driver.doomed(self._at(handle), words)):
                    break
                self._tell_of(vigil)
            else:
                return
        self._fail(self._at(handle), TimeoutError(verdict), inside=False)
        if not handle.ended.wait(3.0):  # its own thread may be failing at this very moment
            handle.end(None, self.broken or self._stuck())

    def _stuck(self) -> GossamerError:
        return GossamerError(f"lane {self.name!r} is stuck")

    def see_through(self, handle: Task, until: float) -> None:
        """Let what was started come to its end, while there is hope, and no longer than `until`.

        A quorum that is waited for may never come together again.
        """

        def over() -> bool:
            return handle.done() or isinstance(handle.verb, WaitQuorum)

        def left() -> float:
            return until - time.monotonic()

        if poll(over, min(self._pulse.soon, left()), self.halt):
            return
        with self._pulse.monitor(lambda: self._asks_for(handle)) as vigil:
            while left() > 0 and not poll(over, min(self._pulse.often, left()), self.halt):
                if self.halt.is_set() or vigil.verdict(lambda words: self._driver.doomed(self._at(handle), words)):
                    return

    def _at(self, handle: Task) -> Task | None:
        """Where the lane stands: its thread may be further on than a GPU that waits for a peer."""
        return handle if handle.ended.is_set() else self._now

    def _asks_for(self, handle: Task) -> bool:
        return self._driver.asking or handle.ended.is_set()

    def _tell_of(self, vigil: WaitMonitor) -> None:
        """Say once that others take longer than the deadline, which they may."""
        working = vigil.working()
        if vigil.is_late() and working and not vigil.warned:
            vigil.warned = True
            warnings.warn(
                f"rank {self._pulse.store.rank} has waited for {vigil.deadline:g} seconds at {self._place()}: {ranks(working)} "
                f"{'is' if len(working) == 1 else 'are'} alive and at work elsewhere; it goes on waiting",
                RuntimeWarning,
                stacklevel=3,
            )

    def _place(self) -> str:
        now = self._now
        return "the end" if now is None else f"step {now.step}, {now.label or 'unlabelled'!r}"

    def close(self, patience: float) -> bool:
        """End the lane; what has not ended ends with an error. False if it is stuck in the backend."""
        self._stop(GossamerError(f"lane {self.name!r} was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _work(self) -> None:
        stream = settle_on(self.device)
        with torch.no_grad():
            while (handle := self._queue.get()) is not None:
                self._now = handle
                try:
                    if handle.order is None or stream is None:
                        result = self._driver.drive(handle, self.halt)
                    else:
                        with handle.order.on(stream):
                            result = self._driver.drive(handle, self.halt)
                except BaseException as error:
                    self._fail(handle, error, inside=True)
                    self._driver.hang_up()  # wakes the peers that wait for us
                    return
                self._now = None
                handle.end(result, None)
                del handle, result  # an idle lane keeps nothing alive

    def _fail(self, handle: Task | None, error: BaseException, inside: bool) -> None:
        with self._lock:
            if self._failing or self.broken is not None:
                return
            self._failing = True
        self._stop(self._driver.account(handle, error, inside))

    def _stop(self, error: BaseException) -> None:
        """Take no more programs; all that have not ended end with this error."""
        with self._lock:
            self.broken = self.broken or error
            waiting: list[Task | None] = [self._now]
            with suppress(queue.Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            self._queue.put(None)
        self.halt.set()
        for handle in waiting:
            if handle is not None:
                handle.end(None, self.broken)
