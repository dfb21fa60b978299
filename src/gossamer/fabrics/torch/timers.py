"""Timers: the seconds of a request, and the seconds that the training loop waits for the network.

On a GPU they measure the time between two events, known once both have happened; on a CPU they use the host's clock.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

Tell = Callable[[float], None]  # takes seconds
Note = Callable[[float], int]  # adds a ledger entry with its seconds; returns its index
Amend = Callable[[int, float], None]  # sets the seconds of the entry at an index


# -- requests of one comm thread, which calls `begin` and `end`; any thread calls `settle` ----------------------------------


class HostRequestTimer:
    """Times requests with the host's clock, for requests that the host waits for."""

    def begin(self) -> float:
        return perf_counter()

    def end(self, began: float, note: Note) -> None:
        note(perf_counter() - began)

    def settle(self) -> None:
        pass


class EventRequestTimer:
    """Times requests with CUDA events, for requests queued on a stream: notes them at once, and their seconds later."""

    def __init__(self, device: torch.device, amend: Amend) -> None:
        self._device, self._amend = device, amend
        self._spans = deque[tuple[Any, Any, int]]()
        self._lock = threading.Lock()

    def begin(self) -> Any:
        return timed_event(self._device)

    def end(self, began: Any, note: Note) -> None:
        self.settle()  # a program that answers others for as long as they train is not joined before its end
        with self._lock:
            self._spans.append((began, self.begin(), note(0.0)))

    def settle(self) -> None:
        with self._lock:
            while self._spans and _both_have_happened(*self._spans[0][:2]):
                began, ended, place = self._spans.popleft()
                self._amend(place, _seconds(began, ended))


# -- how long the training loop waits for the network: all waits within `counted` --------------------------------------------


class HostExposedTime:
    """Counts the time in which the host waits."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.since: float | None = None  # when the wait under way began, by the host's clock

    @contextmanager
    def counted(self) -> Generator[None]:
        self.since = began = perf_counter()
        try:
            yield
        finally:
            self.since = None
            self._tell(perf_counter() - began)

    def gap(self, ready: Any, arrived: Any) -> None:
        pass


class EventExposedTime:
    """Counts the time in which the GPU was idle, not that of the host, which may also wait for the backward pass."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self.since: float | None = None
        self._counts = False
        self._gaps = deque[tuple[Any, Any]]()

    @contextmanager
    def counted(self) -> Generator[None]:
        self._settle()  # of earlier waits
        self._counts, self.since = True, perf_counter()
        try:
            yield
        finally:
            self._counts, self.since = False, None
        self._settle()  # most waits end when the host has read what has come, so this one is known already

    def gap(self, ready: Any, arrived: Any) -> None:
        """Count a wait of a stream from the event `ready` to the event `arrived`."""
        if self._counts:
            self._gaps.append((ready, arrived))

    def _settle(self) -> None:
        while self._gaps and _both_have_happened(*self._gaps[0]):
            self._tell(_seconds(*self._gaps.popleft()))


def _both_have_happened(one: Any, other: Any) -> bool:
    return one.query() and other.query()


def _seconds(began: Any, ended: Any) -> float:
    return max(0.0, began.elapsed_time(ended) / 1000)


def timed_event(device: torch.device) -> Any:
    """Record a timed event on the current stream of a device."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def request_timer_of(device: torch.device, amend: Amend) -> HostRequestTimer | EventRequestTimer:
    return EventRequestTimer(device, amend) if device.type == "cuda" else HostRequestTimer()


def exposed_time_of(device: torch.device, tell: Tell) -> HostExposedTime | EventExposedTime:
    return EventExposedTime(tell) if device.type == "cuda" else HostExposedTime(tell)
