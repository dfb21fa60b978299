"""Orders the CUDA streams of the training loop and of a comm thread around a started program."""

import inspect
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import GeneratorType
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.core.verbs import Program
from gossamer.fabrics.torch.timers import timed_event

_PAUSES = (0.0002, 0.005)  # seconds between two queries of an event, at least and at most
_LATE = 0.02  # the share of a wait by which the host may notice its end too late


def settle_on(device: torch.device) -> torch.cuda.Stream | None:
    """Set the current device of a new comm thread, and return a stream for it; None if the device has no streams.

    The stream has high priority, so that sends do not wait behind kernels that compute.
    """
    if device.type != "cuda":
        return None
    torch.cuda.set_device(device)
    return torch.cuda.Stream(device, priority=-1)


class StreamOrder:
    """Orders a started program after the kernels that its starter has queued, and its joiner after the program.

    It also keeps memory valid. The program's tensors live until it is joined, since the allocator would reuse them in the
    order of the starter's stream; the tensors of its result are marked as used on the joiner's stream.
    """

    def __init__(self, program: Program[Any], device: torch.device) -> None:
        self._device = device
        self._begin = torch.cuda.current_stream(device).record_event()
        self._given = list(_given(program))
        self._end: Any = None
        self._awaited: Any = None  # when the joiner's stream has nothing left to do but to wait

    @staticmethod
    def of(program: Program[Any], device: torch.device) -> "StreamOrder | None":
        return StreamOrder(program, device) if device.type == "cuda" else None

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Generator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(self._begin)
            yield
            self._end = timed_event(self._device)

    def await_it(self) -> None:
        """The joiner begins to wait: what its stream was given so far runs on meanwhile."""
        self._awaited = timed_event(self._device)

    def arrives(self, seconds: float) -> bool:
        """True if the kernels of the ended program are done within `seconds`; True at once if it failed.

        The host polls, since a wait in CUDA could not be ended if a peer is missing.
        """
        began = time.monotonic()
        while self._end is not None and not self._end.query():
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            time.sleep(min(max(_LATE * waited, _PAUSES[0]), _PAUSES[1]))
        return True

    def land(self, result: Any) -> tuple[Any, Any]:
        """Make the joiner's stream wait for the program; returns the events at which it began to wait, and can go on."""
        current = torch.cuda.current_stream(self._device)
        ready = self._awaited or timed_event(self._device)
        if self._end is not None:
            current.wait_event(self._end)
            for tensor in tensors_in(result):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        self._given.clear()
        return ready, self._end or ready


def _given(program: Program[Any]) -> Iterator[Any]:
    """The local variables of a program, and of the programs that it runs."""
    for value in inspect.getgeneratorlocals(cast("GeneratorType[Any, Any, Any]", program)).values():
        yield value
        if isinstance(value, GeneratorType):
            yield from _given(cast("Program[Any]", value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif is_dataclass(value):
        yield from tensors_in(vars(value))
