"""Notice: a signal on any rank stops all of them after the same step; steps cost nothing while nobody is told."""

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, final

from gossamer.core.errors import AttachError, PeerError
from gossamer.fabrics.liveness.heartbeat import Heartbeat, rank_statuses, ranks
from gossamer.fabrics.liveness.store import SharedStore

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))  # Windows has one
_TOLD = "notice/told"
_LOOK = 0.02  # seconds between two looks while a loop waits for the others' steps


@final
class Notice:
    """Agrees, through the store and in the thread of the heartbeat, on the step after which all ranks stop.

    A rank that is told says so. Each rank then writes the first step after which it can stop: the one after the last at
    which its loop heard that it may go on. All stop after the latest of them. A loop that comes to its own step waits until
    all are known; the others' threads write theirs whatever their loops do, so nobody waits for a step.

    `everyone` is a store of more ranks than post this heartbeat: of a sharded model those of all shards, which then stop alike.
    """

    def __init__(self, pulse: Heartbeat, everyone: SharedStore | None = None) -> None:
        self._pulse, self._store = pulse, everyone or pulse.store
        self.received: int | None = None  # the signal that this rank got
        self._lock = threading.Lock()
        self._passed = -1  # the last step after which the loop went on
        self._own: int | None = None  # the first step after which this rank can stop
        self._last: int | None = None  # the step after which all stop
        self._agreed = threading.Event()
        pulse.each_time = self._look

    @property
    def stops_after(self) -> int | None:
        """The step after which all ranks stop; None while it is not agreed on."""
        return self._last

    def may_stop(self, step: int) -> bool:
        """True if all ranks stop after this step; ask on all ranks after the same steps."""
        if self._store.size == 1:
            return self.received is not None
        with self._lock:
            own = self._own
            if own is None or step < own:
                self._passed = max(self._passed, step)
                return False
        self._wait()
        assert self._last is not None
        return step >= self._last

    def _wait(self) -> None:
        began = time.monotonic()
        while not self._agreed.wait(_LOOK):
            if self._pulse.lost is not None or time.monotonic() - began >= self._pulse.deadline:
                why = "the store does not answer"
                if self._pulse.lost is None:
                    why = f"{ranks(self._missing())} did not say a step within {self._pulse.deadline:g} seconds"
                raise PeerError(
                    f"a rank was told to stop, and the step after which all stop could not be agreed on, since {why}: start all "
                    "ranks again from a checkpoint"
                )
            self._pulse.hurry()

    def _missing(self) -> list[int]:
        return [r for r in self._store.others if not self._store.flag_is_up(f"notice/{r}")]

    # -- in the heartbeat's thread -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._agreed.is_set():
            return
        if self._own is None:
            if self.received is not None:
                self._store.raise_flag(_TOLD, str(self.received))
            elif not self._store.flag_is_up(_TOLD):
                return
            with self._lock:
                self._own = self._passed + 1
            self._store.raise_flag(f"notice/{self._store.rank}", str(self._own))
        if missing := self._missing():
            left = {r for r, status in rank_statuses(self._store).items() if status.state == "left"}
            if not left.issuperset(missing):
                return
        there = [f"notice/{r}" for r in self._store.others if r not in missing]
        self._last = max([self._own, *self._store.numbers(there)])
        self._agreed.set()

    # -- signals -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Take the first signal as a notice; see `taken_as_notice`."""
        try:
            with taken_as_notice(self):
                yield
        finally:
            if self._store.size > 1 and self._own is None:  # say a step: nobody is to wait for a loop that has ended
                with suppress(RuntimeError):  # where the store is gone nobody waits
                    self._store.raise_flag(f"notice/{self._store.rank}", str(self._passed + 1))


@final
class OwnNotice:
    """A notice to this rank alone."""

    def __init__(self) -> None:
        self.received: int | None = None  # the signal that this rank got

    @property
    def stops_after(self) -> int | None:
        """The step after which all ranks stop: they go on."""
        return None

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Take the first signal as a notice; see `taken_as_notice`."""
        with taken_as_notice(self):
            yield


@contextmanager
def taken_as_notice(notice: Notice | OwnNotice) -> Generator[None]:
    """Take the first of `SIGNALS` as a notice. A second one acts as it did before, and so do all of them afterwards."""
    if threading.current_thread() is not threading.main_thread():
        raise AttachError("signals can be watched in the main thread only: enter comm.leaving_at() there")
    before = dict[int, Any]()

    def take(number: int, frame: Any) -> None:
        # A plain value only: the thread that was stopped may hold any lock.
        notice.received = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is take:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    try:
        for number in SIGNALS:
            before[number] = signal.getsignal(number)
            signal.signal(number, take)
        yield
    finally:
        restore()
