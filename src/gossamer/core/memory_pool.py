"""Buffers: memory that serves again, step after step.

On a CPU new memory of a block's size costs more than most passes over it: each of its pages is mapped, and cleared, when
it is first touched. A GPU's allocator keeps what it has, so there this only hands requests on.
"""

from collections.abc import Callable
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from gossamer.core.torch_private import private_name

_use_count: Callable[[int], int] = private_name(torch._C, "_storage_Use_Count", "finds out which memory is free again")
_SMALL = 65_536  # bytes; less than this the process keeps itself
_LINE = 64  # bytes that a processor reads at once
_LENGTHS = 64  # of which memory is kept; where lengths follow the data, no two may be the same


def uninitialised(length: int, device: torch.device) -> Tensor:
    """Bytes whose content is arbitrary. On a CPU they come from NumPy, which asks for huge pages, of which there are few to map."""
    if device.type != "cpu" or length < _SMALL:
        return torch.empty(length, dtype=torch.uint8, device=device)
    raw = np.empty(length + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return torch.from_numpy(raw[start : start + length])


def holders(tensor: Tensor) -> int:
    """How many tensors share its memory, itself included; only good to be compared with what it was."""
    return _use_count(tensor.untyped_storage()._cdata)


class MemoryPool:
    """Lends memory, and takes it back when no tensor lies in it any more: nobody returns anything.

    So what is assigned to a state, or travels, is safe as long as somebody holds it; and a draft that is dropped gives its
    memory back, as does the state that a draft replaces.
    """

    def __init__(self) -> None:
        self._buffers = dict[int, list[tuple[Tensor, int]]]()  # by length: the memory, and its holders when it is free
        self._lock = Lock()  # lanes and the training loop's thread may ask at once

    def of(self, length: int, device: torch.device) -> Tensor:
        """So many bytes, of arbitrary content."""
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
        """A tensor of this one's shape and kind, of arbitrary content."""
        return self.of(tensor.numel() * tensor.element_size(), tensor.device).view(tensor.dtype).view(tensor.shape)
