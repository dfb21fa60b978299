"""Streams and events as vector clocks.

A stream's own time moves on with each operation that is put on it. Its clock says, for every stream, up to which time that
stream's work is certain to have ended before what comes next on this one. To record an event is to copy the clock; to
wait for an event is to take the larger of both clocks, entry by entry. What the host has waited for is over for
everybody, and stands in `finished`.
"""

import contextlib
import threading
import time
from collections.abc import Generator
from typing import Any

import torch
from tests.gpu.diary import diary, lock

Clock = dict["Stream", int]

finished: Clock = {}


def merge(into: Clock, other: Clock) -> None:
    for stream, moment in other.items():
        into[stream] = max(into.get(stream, 0), moment)


class Stream:
    """Stands for torch.cuda.Stream."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, name: str = "", **_: Any) -> None:
        Stream._made += 1
        self.device = torch.device("cuda", index_of(device))
        self.priority, self.cuda_stream = priority, Stream._made
        self.name = name or f"stream {Stream._made} of {self.device}"
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return self.name

    def tick(self) -> int:
        """One more operation; returns its time."""
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def knows(self, other: "Stream", moment: int) -> bool:
        """Whether what `other` did at that moment is over when the next operation of this stream begins."""
        return other is self or moment <= max(self.clock.get(other, 0), finished.get(other, 0))

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        with lock:
            event.clock, event.seconds = dict(self.clock), time.perf_counter()
        return event

    def wait_event(self, event: "Event") -> None:
        with lock:
            merge(self.clock, event.clock)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        host_waits_for(self, "Stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        _here().entered.append(_current(self))
        set_current(self)
        return self

    def __exit__(self, *_: object) -> None:
        device, stream = _here().entered.pop()
        set_current(stream)
        set_device(device)


class Event:
    """Stands for torch.cuda.Event. It is never still to come: here everything runs at once.

    So who only asks whether it has happened knows nothing from the answer: on a GPU it could have been no.
    """

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}
        self.seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        diary.waits("Event.synchronize")
        with lock:
            merge(finished, self.clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return (end.seconds - self.seconds) * 1e3


class _Here(threading.local):
    """Each thread begins on device 0, whatever other threads have chosen."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = dict[int, Stream]()
        self.entered = list[tuple[int, Stream]]()


_local = _Here()
_defaults = dict[int, Stream]()


def _here() -> _Here:
    return _local


def index_of(device: Any) -> int:
    """The number of a CUDA device, as torch reads it: none means the current one."""
    if device is None:
        return _local.device
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _local.device if index is None else index


def current_device() -> int:
    return _local.device


def set_device(device: Any) -> None:
    _local.device = index_of(device)


def default_stream(device: Any = None) -> Stream:
    index = index_of(device)
    with lock:
        if index not in _defaults:
            _defaults[index] = Stream(index, name=f"the default stream of cuda:{index}")
        return _defaults[index]


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return _local.streams.get(index) or default_stream(index)


def set_current(stream: Stream) -> None:
    """As torch does: it also makes the stream's device the current one."""
    _local.device = stream.device.index
    _local.streams[stream.device.index] = stream


def _current(stream: Stream) -> tuple[int, Stream]:
    return _local.device, current_stream(stream.device)


@contextlib.contextmanager
def on(stream: Stream | None) -> Generator[None]:
    """Stands for torch.cuda.stream."""
    with contextlib.nullcontext() if stream is None else stream:
        yield


@contextlib.contextmanager
def device_guard(device: Any) -> Generator[None]:
    """Stands for torch.cuda.device."""
    before = _local.device
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def host_waits_for(stream: Stream, what: str) -> None:
    diary.waits(what)
    with lock:
        merge(finished, stream.clock)


def synchronize(device: Any = None) -> None:
    """Stands for torch.cuda.synchronize: all streams of a device."""
    diary.waits("torch.cuda.synchronize")
    index = index_of(device)
    with lock:
        for clock in [default_stream(index).clock, current_stream(index).clock]:
            merge(finished, clock)
        for stream in list(everyone):
            if stream.device.index == index:
                merge(finished, stream.clock)


everyone = list[Stream]()  # streams that work for the device unseen, such as NCCL's
