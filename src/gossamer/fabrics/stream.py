"""A program's way to the lane's CUDA stream and back. Written with care, but not yet run on a GPU."""

import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import GeneratorType
from typing import Any, cast

import torch
from torch import Tensor

from gossamer.core.verbs import Program


class Passage:
    """Orders a started program after what its starter has queued, and its joiner after the program.

    Memory is ordered too: what the program was given lives until it is joined, since the allocator would hand it out
    again in the order of the starter's stream; what it returns is marked as used on the joiner's stream.
    """

    def __init__(self, program: Program[Any]) -> None:
        self._device = torch.cuda.current_device()
        self._begin = torch.cuda.current_stream().record_event()
        self._given: list[Any] = list(inspect.getgeneratorlocals(cast("GeneratorType[Any, Any, Any]", program)).values())
        self._end: Any = None

    @staticmethod
    def of(program: Program[Any]) -> "Passage | None":
        return Passage(program) if torch.cuda.is_initialized() else None

    def new_stream(self) -> torch.cuda.Stream:
        """For the lane's thread, which stands on no device yet: a stream where the program was started."""
        return torch.cuda.Stream(self._device)

    @contextmanager
    def aboard(self, stream: torch.cuda.Stream) -> Generator[None]:
        with torch.cuda.stream(stream):
            stream.wait_event(self._begin)
            yield
            self._end = stream.record_event()

    def land(self, result: Any) -> None:
        if self._end is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self._end)
            for tensor in _tensors(result):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        self._given.clear()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif is_dataclass(value):
        yield from _tensors(vars(value))
