"""Watches: how long a request took. On a GPU that is the time between two events, known once both have happened."""

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch

Tell = Callable[[float], None]  # is told the seconds


class Watch(Protocol):
    """For one lane: `begin` and `end` are called in its thread, `settle` in any."""

    def begin(self) -> Any: ...

    def end(self, began: Any, tell: Tell) -> None: ...

    def settle(self) -> None: ...


class HostWatch:
    """The host's clock, for requests that the host waits for."""

    def begin(self) -> float:
        return perf_counter()

    def end(self, began: float, tell: Tell) -> None:
        tell(perf_counter() - began)

    def settle(self) -> None:
        pass


class EventWatch:
    """A stream's clock, for requests that the host only puts there. What has not happened yet is told later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans = deque[tuple[Any, Any, Tell]]()
        self._lock = threading.Lock()

    def begin(self) -> Any:
        return happening(self._device)

    def end(self, began: Any, tell: Tell) -> None:
        with self._lock:
            self._spans.append((began, self.begin(), tell))

    def settle(self) -> None:
        with self._lock:
            while self._spans and self._spans[0][0].query() and self._spans[0][1].query():
                began, ended, tell = self._spans.popleft()
                tell(max(0.0, began.elapsed_time(ended) / 1000))


def happening(device: torch.device) -> Any:
    """An event on the current stream of a device, of which the time is known."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def watch_of(device: torch.device) -> Watch:
    return EventWatch(device) if device.type == "cuda" else HostWatch()
