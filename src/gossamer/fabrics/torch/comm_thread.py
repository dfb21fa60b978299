"""A comm thread: runs started programs one after the other, each to its end."""

import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch

from gossamer.core.errors import GossamerError
from gossamer.core.verbs import Handle, Program, Verb, WaitQuorum
from gossamer.fabrics.liveness.heartbeat import Heartbeat, RankStatus, WaitMonitor, ranks
from gossamer.fabrics.liveness.store import poll
from gossamer.fabrics.torch.stream import StreamOrder, settle_on


class Task(Handle[Any]):
    """A started program: queued on its comm thread, running, or ended with a result or an error.

    A task `by_itself` is a single request that the training loop makes outside of a started program.
    """

    def __init__(
        self, program: Program[Any], label: str, step: int, lane: "CommThread", by_itself: bool = False
    ) -> None:
        self.by_itself = by_itself
        self.program, self.label, self.step, self.lane = program, label, step, lane
        self.order = StreamOrder.of(program, lane.device)
        self.verb: Verb | None = None  # the request that it waits for
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
        """Wait at most `seconds` for its end and for its GPU work; True if both are done."""
        until = time.monotonic() + seconds
        if not self.ended.wait(seconds):
            return False
        return self.order is None or self.error is not None or self.order.arrives(until - time.monotonic())

    def end(self, result: Any, error: BaseException | None) -> None:
        if not self.ended.is_set():  # the first result counts: an abandoned comm thread may still end its program
            self.result, self.error = result, error
            self.ended.set()

    def give_up(self, error: BaseException) -> None:
        """Set an error, also on a task that has ended while its GPU work waits for a peer."""
        self.error = self.error or error
        self.ended.set()


class Driver(Protocol):
    """Runs the programs of a comm thread, and reports failures."""

    asking: bool  # True during a network request, False while the program computes

    def drive(self, handle: Task, halt: threading.Event) -> Any: ...
    def account(self, handle: Task | None, error: BaseException, inside: bool) -> BaseException: ...
    def doomed(self, handle: Task | None, words: Mapping[int, RankStatus]) -> str: ...
    def hang_up(self, patience: float = 0.0) -> None: ...


class CommThread:
    """Runs programs in the order they come in.

    The first failure ends a comm thread for good: after it the ranks could disagree on the next collective, and a
    reduction could be matched with the wrong one without an error.
    """

    def __init__(self, name: str, driver: Driver, pulse: Heartbeat, device: torch.device) -> None:
        self.name, self.device = name, device
        self.broken: BaseException | None = None
        self._driver, self._pulse = driver, pulse
        self._queue = queue.SimpleQueue[Task | None]()
        self._now: Task | None = None
        self._lock = threading.Lock()
        self._failing = False
        self.halt = threading.Event()  # set when the thread is broken or closed, to end all polling
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
        """Wait until a task has ended; if it cannot end any more, end the comm thread and the task with an error."""
        if not handle.done():
            self._wait(handle)
        if self._failing and handle.order is not None:  # on a GPU, complete work cannot be told from aborted work
            self.halt.wait(3.0)
            handle.give_up(self.broken or self._stuck())

    def _wait(self, handle: Task) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"deadlock: a program on comm thread {self.name!r} joins {handle.label!r}, which is queued behind it; start it "
                "on another comm thread"
            )
        if handle.arrives(self._pulse.soon):
            return
        with self._pulse.monitor(lambda: self._asks_for(handle)) as monitor:
            while not handle.arrives(self._pulse.often):
                if verdict := monitor.verdict(lambda words: self._driver.doomed(self._at(handle), words)):
                    break
                self._tell_of(monitor)
            else:
                return
        self._fail(self._at(handle), TimeoutError(verdict), inside=False)
        if not handle.ended.wait(3.0):  # its thread may be about to set an error
            handle.end(None, self.broken or self._stuck())

    def _stuck(self) -> GossamerError:
        return GossamerError(
            f"comm thread {self.name!r} did not end within 3 seconds after a failure: end this process and start all ranks again"
        )

    def see_through(self, handle: Task, until: float) -> None:
        """Wait until a task has ended, or cannot end any more, or time is over (`until`).

        A task that waits for a quorum is not waited for: the quorum may never be complete.
        """

        def over() -> bool:
            return handle.done() or isinstance(handle.verb, WaitQuorum)

        def left() -> float:
            return until - time.monotonic()

        if poll(over, min(self._pulse.soon, left()), self.halt):
            return
        with self._pulse.monitor(lambda: self._asks_for(handle)) as monitor:
            while left() > 0 and not poll(over, min(self._pulse.often, left()), self.halt):
                if self.halt.is_set() or monitor.verdict(lambda words: self._driver.doomed(self._at(handle), words)):
                    return

    def _at(self, handle: Task) -> Task | None:
        """The task that is waited for: `handle` if its thread has ended it but the GPU has not, else the running task."""
        return handle if handle.ended.is_set() else self._now

    def _asks_for(self, handle: Task) -> bool:
        return self._driver.asking or handle.ended.is_set()

    def _tell_of(self, monitor: WaitMonitor) -> None:
        """Warn once if ranks that are alive take longer than the deadline."""
        working = monitor.working()
        if monitor.is_late() and working and not monitor.warned:
            monitor.warned = True
            warnings.warn(
                f"rank {self._pulse.store.rank} has waited {monitor.deadline:g} seconds at {self._place()}: {ranks(working)} "
                f"{'is' if len(working) == 1 else 'are'} alive and busy elsewhere, so it continues to wait",
                RuntimeWarning,
                stacklevel=3,
            )

    def _place(self) -> str:
        now = self._now
        return "the end of its programs" if now is None else f"step {now.step}, {now.label or 'unlabelled'!r}"

    def close(self, patience: float, break_off: Callable[[], None] | None = None) -> bool:
        """End the thread; tasks that have not ended get an error. False if the thread is stuck in the backend.

        With `break_off`, which breaks its connections, a task that is computing comes to its end, or to its next request.
        """
        if break_off is not None and threading.current_thread() is not self._thread:
            self._come_to_rest(break_off)
        self._stop(GossamerError(f"comm thread {self.name!r} was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _come_to_rest(self, break_off: Callable[[], None]) -> None:
        """Let the thread end by itself, so that a task has ended here where it has on other ranks, or can be driven on."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = GossamerError(f"comm thread {self.name!r} was closed")
            waiting = self._queued()
            self._queue.put(None)
        self.halt.set()
        for handle in waiting:
            handle.end(None, self.broken)
        asks = 0
        while self._thread.is_alive() and asks < 30:
            self._thread.join(0.1)
            asks = asks + 1 if self._driver.asking else 0
            if asks == 2:
                break_off()

    def _queued(self) -> list[Task]:
        """Take all tasks out of the queue."""
        out = list[Task]()
        with suppress(queue.Empty):
            while True:
                if (handle := self._queue.get_nowait()) is not None:
                    out.append(handle)
        return out

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
                    self._driver.hang_up()  # peers that wait for this rank fail at once
                    return
                self._now = None
                handle.end(result, None)
                del handle, result  # an idle comm thread keeps no tensors alive

    def _fail(self, handle: Task | None, error: BaseException, inside: bool) -> None:
        with self._lock:
            if self._failing or self.broken is not None:
                return
            self._failing = True
        self._stop(self._driver.account(handle, error, inside))

    def _stop(self, error: BaseException) -> None:
        """Accept no more programs, and end all unfinished tasks with this error."""
        with self._lock:
            self.broken = self.broken or error
            waiting = [*([self._now] if self._now is not None else []), *self._queued()]
            self._queue.put(None)
        self.halt.set()
        for handle in waiting:
            handle.end(None, self.broken)
