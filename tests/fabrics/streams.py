"""Streams and events that write down what is asked of them, in the place of CUDA's."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

GPU = torch.device("cuda", 3)


class Event:
    """Has happened, unless somebody says that none has."""

    happens = True

    def __init__(self, **_: Any) -> None:
        self.moment = 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        self.moment = time.perf_counter()

    def query(self) -> bool:
        return Event.happens

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.moment - self.moment)


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        assert device is not None, "nobody asks for the current device"
        self.device = torch.device(device)

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        pass


class Cuda:
    """What was asked of torch.cuda, by thread."""

    def __init__(self) -> None:
        self.devices = list[tuple[str, torch.device]]()
        self.local = threading.local()

    def set_device(self, device: Any) -> None:
        self.devices.append((threading.current_thread().name, torch.device(device)))

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self.local, "stream", None) or Stream(device)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.local.stream = stream
        try:
            yield
        finally:
            self.local.stream = None


def install(patch: pytest.MonkeyPatch) -> Cuda:
    """Until the patch is undone, torch.cuda is this."""

    def nobody_asks() -> int:
        raise AssertionError("the device is that of the parameters, not the current one")

    cuda = Cuda()
    patch.setattr(Event, "happens", True)
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "current_device", nobody_asks)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    for name in ("set_device", "current_stream", "stream"):
        patch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda
