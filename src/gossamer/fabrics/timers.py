"""Watches: how long a request took, and how long the training loop stood still.

On a GPU that is the time between two events, known once both have happened; on a CPU the host's.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol

import torch

Tell = Callable[[float], None]  # is told the seconds
Note = Callable[[float], int]  # writes down what took so many seconds; returns the place
Amend = Callable[[int, float], None]  # is told the place, and the seconds it took after all


class RequestTimer(Protocol):
    """For one lane: `begin` and `end` are called in its thread, `settle` in any."""

    def begin(self) -> Any: ...

    def end(self, began: Any, note: Note) -> None: ...

    def settle(self) -> None: ...


class HostRequestTimer:
    """The host's clock, for requests that the host waits for."""

    def begin(self) -> float:
        return perf_counter()

    def end(self, began: float, note: Note) -> None:
        note(perf_counter() - began)

    def settle(self) -> None:
        pass


class EventRequestTimer:
    """A stream's clock, for requests that the host only puts there: they are noted now, and how long they took later."""

    def __init__(self, device: torch.device, amend: Amend) -> None:
        self._device, self._amend = device, amend
        self._spans = deque[tuple[Any, Any, int]]()
        self._lock = threading.Lock()

    def begin(self) -> Any:
        return timed_event(self._device)

    def end(self, began: Any, note: Note) -> None:
        with self._lock:
            self._spans.append((began, self.begin(), note(0.0)))

    def settle(self) -> None:
        with self._lock:
            while self._spans and _both_have_happened(*self._spans[0][:2]):
                began, ended, place = self._spans.popleft()
                self._amend(place, _seconds(began, ended))


class ExposedTime(Protocol):
    """For the training loop: whatever it waits for in `counted`, it waits for the network."""

    def counted(self) -> AbstractContextManager[None]: ...

    def gap(self, ready: Any, arrived: Any) -> None:
        """A stream could have gone on at one event, and can at another."""
        ...


class HostExposedTime:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    @contextmanager
    def counted(self) -> Generator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._tell(perf_counter() - began)

    def gap(self, ready: Any, arrived: Any) -> None:
        pass


class EventExposedTime:
    """The host may wait for a backward pass as well; what counts is that the GPU had nothing else to do."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._counts = False
        self._gaps = deque[tuple[Any, Any]]()

    @contextmanager
    def counted(self) -> Generator[None]:
        while self._gaps and _both_have_happened(*self._gaps[0]):  # of earlier waits
            self._tell(_seconds(*self._gaps.popleft()))
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def gap(self, ready: Any, arrived: Any) -> None:
        if self._counts:
            self._gaps.append((ready, arrived))


def _both_have_happened(one: Any, other: Any) -> bool:
    return one.query() and other.query()


def _seconds(began: Any, ended: Any) -> float:
    return max(0.0, began.elapsed_time(ended) / 1000)


def timed_event(device: torch.device) -> Any:
    """An event on the current stream of a device, of which the time is known."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def request_timer_of(device: torch.device, amend: Amend) -> RequestTimer:
    return EventRequestTimer(device, amend) if device.type == "cuda" else HostRequestTimer()


def exposed_time_of(device: torch.device, tell: Tell) -> ExposedTime:
    return EventExposedTime(tell) if device.type == "cuda" else HostExposedTime(tell)
