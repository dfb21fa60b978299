"""Integer lanes: fills a stretch of lanes at a time, which stays in cache."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Ints, kernel

Levels = npt.NDArray[np.int8]
_STRETCH = 2048


def pack(levels: Tensor, top: int, bits: int, fields: int) -> Tensor:
    lanes = torch.zeros(-(-levels.numel() // fields), dtype=torch.int32)
    _pack(levels.numpy(), top, bits, lanes.numpy())
    return lanes


def unpack(lanes: Tensor, n: int, shift: int, bits: int, fields: int) -> Tensor:
    out = torch.empty(n, dtype=torch.int32)
    _unpack(lanes.numpy(), shift, bits, out.numpy())
    return out


@kernel
def _pack(levels: Levels, top: int, bits: int, lanes: Ints) -> None:
    shift = np.int32(top)
    for lo in range(0, lanes.size, _STRETCH):
        stretch = lanes[lo : lo + _STRETCH]
        up = np.int32(0)
        for start in range(lo, levels.size, lanes.size):
            row = levels[start : start + stretch.size]
            for j in range(row.size):
                stretch[j] |= np.int32(np.int32(np.int32(row[j]) + shift) << up)
            up = np.int32(up + np.int32(bits))


@kernel
def _unpack(lanes: Ints, shift: int, bits: int, out: Ints) -> None:
    mask = np.int32((1 << bits) - 1)
    for lo in range(0, lanes.size, _STRETCH):
        stretch = lanes[lo : lo + _STRETCH]
        down = np.int32(0)
        for start in range(lo, out.size, lanes.size):
            row = out[start : start + stretch.size]
            for j in range(row.size):
                row[j] = np.int32(np.int32(np.int32(stretch[j] >> down) & mask) - np.int32(shift))
            down = np.int32(down + np.int32(bits))
