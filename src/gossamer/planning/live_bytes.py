"""Counts the bytes of tensors that are alive while a program runs, and the most that were at once."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.core.memory_pool import MemoryPool


class LiveBytes(TorchDispatchMode):
    """While it is entered, the memory of each tensor that an operation reads or writes is counted until it is freed.

    Memory counts once, however many tensors share it. Kernels that work on memory by its address are not seen, but what they
    read and write is.

    >>> import torch
    >>> with LiveBytes() as live:
    ...     kept = torch.zeros(1000, dtype=torch.float32) + 1
    >>> live.now, live.most
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = dict[int, Any]()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note_all((args, out, *(kwargs or {}).values()))
        return out

    def _note_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._note(value)
            elif isinstance(value, tuple | list):
                self._note_all(value)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, length = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def freed(_: Any) -> None:
            if self._seen.pop(key, None) is not None:
                self.now -= length

        self._seen[key] = ref(storage, freed)
        self.now += length
        self.most = max(self.most, self.now)


class FreshMemory(MemoryPool):
    """Stands in for a pool where a device's allocator keeps what it has: memory that is freed is not held."""

    def of(self, length: int, device: torch.device) -> Tensor:
        return torch.empty(length, dtype=torch.uint8, device=device)
