"""Selection by magnitude: flags for a block of elements, then a walk over the words that have any."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Floats, Ints, kernel
from gossamer.kernels.cpu.hints import prefetch, wide

Flags = npt.NDArray[np.uint8]
_BLOCK = 1024
_WORD = 8  # flags that are looked at together
_NAN = 0x7F800001  # one key for every NaN, above infinity
_SMALL = 1 << 16  # below this, selecting among all elements is faster than sampling


def compact(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    # a threshold between two float32 values selects from the upper one
    bar = np.float32(max(threshold, 0.0))
    bar = bar if float(bar) >= threshold else np.nextafter(bar, np.float32(np.inf))
    indices, values = _survivors(x.detach().numpy(), int(bar.view(np.int32)), x.numel())
    return torch.from_numpy(indices), torch.from_numpy(values)


def topk(x: Tensor, k: int) -> Tensor:
    values = x.detach().numpy()
    if k == 0:
        return torch.empty(0, dtype=torch.int32)
    if values.size > _SMALL and k <= values.size // 16:
        most = 4 * k + 1024
        indices, survivors = _survivors(values, _lower_bound(values, k), most)
        if k <= indices.size <= most:  # else the sample was no guide: there are many ties, as zeros
            return torch.from_numpy(indices[_best(survivors, k)])
    return torch.from_numpy(_best(values, k))


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, weight: float) -> bool:
    return _scatter_add(out.detach().numpy(), indices.numpy(), values.detach().numpy(), np.float32(weight))


def _survivors(values: Floats, bar: int, most: int) -> tuple[Ints, Floats]:
    """Those that reach the bar, with their places; more than `most` if there are more, but not all of them."""
    indices, chosen = np.empty(most + _WORD, np.int32), np.empty(most + _WORD, np.float32)
    count = _compact(values, values.view(np.int32), np.int32(bar), most, indices, chosen)
    return indices[:count].copy(), chosen[:count].copy()


def _lower_bound(values: Floats, k: int) -> int:
    """A magnitude that, judging from a sample, more than k elements reach."""
    stride = max(values.size // min(values.size // 64, 200 * values.size // k), 1)
    keys = _keys(np.ascontiguousarray(values[::stride]).view(np.int32))
    expected = k * keys.size / values.size
    rank = min(int(expected + 4.0 * expected**0.5) + 4, keys.size)
    return int(np.partition(keys, keys.size - rank)[keys.size - rank])


def _best(values: Floats, k: int) -> Ints:
    """Positions of the k largest, lowest position first among equals."""
    keys = _keys(values.view(np.int32))
    bar = np.partition(keys, keys.size - k)[keys.size - k]
    return _pick(keys, bar, k)


@kernel
def _keys(bits: Ints) -> Ints:
    keys = np.empty(bits.size, np.int32)
    for j in range(bits.size):
        magnitude = np.int32(bits[j] & np.int32(0x7FFFFFFF))
        keys[j] = magnitude if magnitude < np.int32(_NAN) else np.int32(_NAN)
    return keys


@kernel
def _pick(keys: Ints, bar: np.int32, k: int) -> Ints:
    level = k
    for j in range(keys.size):
        level -= keys[j] > bar
    chosen = np.empty(k, np.int32)
    count = 0
    for j in range(keys.size):
        if keys[j] > bar or (keys[j] == bar and level > 0):
            level -= keys[j] == bar
            chosen[count] = j
            count += 1
    return chosen


@kernel
def _flag(bits: Ints, bar: np.int32, flags: Flags) -> None:
    wide()
    for j in range(bits.size):
        flags[j] = np.int32(bits[j] & np.int32(0x7FFFFFFF)) >= bar


@kernel
def _compact(x: Floats, bits: Ints, bar: np.int32, most: int, indices: Ints, values: Floats) -> int:
    wide()
    flags = np.zeros(_BLOCK, np.uint8)
    words = flags.view(np.uint64)
    count = 0
    for lo in range(0, x.size, _BLOCK):
        hi = min(lo + _BLOCK, x.size)
        prefetch(bits, hi, hi + _BLOCK)
        _flag(bits[lo:hi], bar, flags)
        flags[hi - lo :] = 0
        for w in range(words.size):
            if words[w] != 0:
                if count > most:
                    return count
                for j in range(_WORD * w, _WORD * w + _WORD):
                    if flags[j]:
                        indices[count] = lo + j
                        values[count] = x[lo + j]
                        count += 1
    return count


@kernel
def _scatter_add(out: Floats, indices: Ints, values: Floats, weight: np.float32) -> bool:
    outside = False
    for j in range(indices.size):
        outside |= indices[j] < 0 or indices[j] >= out.size
    if not outside:
        for j in range(indices.size):
            out[indices[j]] += weight * values[j]
    return not outside
