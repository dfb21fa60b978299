"""A pool of buffers that are reused at every step.

On a CPU new memory of a bucket's size costs more than most passes over it: each of its pages is mapped, and cleared, when
it is first touched. A GPU's allocator keeps what it has, so there this only hands requests on.
"""

from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from gossamer.core.torch_private import private_name

_use_count: Callable[[int], int] = private_name(torch._C, "_storage_Use_Count", "finds out which memory is free again")
_SMALL = 65_536  # bytes; smaller buffers are kept by the process's own allocator
_LINE = 64  # bytes that a processor reads at once
_LENGTHS = 64  # distinct lengths to keep buffers for; lengths that depend on the data may never repeat


def uninitialised(length: int, device: torch.device) -> Tensor:
    """An uninitialised byte tensor. On a CPU it comes from NumPy, which asks for huge pages, of which there are few to map."""
    if device.type != "cpu" or length < _SMALL:
        return torch.empty(length, dtype=torch.uint8, device=device)
    raw = np.empty(length + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return torch.from_numpy(raw[start : start + length])


def holders(tensor: Tensor) -> int:
    """The number of tensors that share its memory, itself included; only to be compared with an earlier count."""
    return _use_count(tensor.untyped_storage()._cdata)


class MemoryPool:
    """Hands out buffers, and reuses each once no tensor uses its memory any more.

    So a buffer that is in a state, or in flight, is safe as long as it is referenced; and a pending state that is dropped gives its
    memory back, as does the state that it replaces.
    """

    def __init__(self) -> None:
        self._buffers = dict[int, list[tuple[Tensor, int]]]()  # by length: the memory, and its holders when it is free
        self._lock = Lock()  # comm threads and the training loop's thread may ask at once

    def of(self, length: int, device: torch.device) -> Tensor:
        """An uninitialised buffer of `length` bytes."""
        if device.type != "cpu" or length < _SMALL:
            return uninitialised(length, device)
        with self._lock:
            buffers = self._buffers[length] = self._buffers.pop(length, [])  # asked for last, so let go of last
            if len(self._buffers) > _LENGTHS:
                del self._buffers[next(iter(self._buffers))]
            for buffer, alone in buffers:
                if holders(buffer) == alone:
                    return buffer.view(-1)
            buffer = uninitialised(length, device)
            buffers.append((buffer, holders(buffer)))
            return buffer.view(-1)

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of the same shape, dtype and device."""
        return self.of(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
