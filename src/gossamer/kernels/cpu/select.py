"""Selection by magnitude: flags for a block of elements, then a walk over the words that have any."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, Longs, kernel, lowest_bit, prefetch, wide
from gossamer.kernels.cpu.scales import divide_all, divisor, top_bits
from gossamer.kernels.layout import Bounds, edges

_BLOCK = 1024
_WORD = 8  # flags that are looked at together
_NAN = 0x7F800001  # one key for every NaN, above infinity
_STRETCH = 4096  # elements that stay near while all that is said of them is added up
_SHORT = 1 << 13  # below this, selecting among all is faster than sampling
_DENSE = 16  # of so many elements at most one may be chosen, if a sample shall pay


def topk_each(x: Tensor, bounds: Bounds, counts: tuple[int, ...], out: Tensor) -> None:
    values, table, ends = x.detach().numpy(), np.array(counts, np.int64), edges(bounds)
    sampled = table[table * _DENSE <= np.diff(ends)]  # of the others all are looked at
    most = 4 * int(sampled.max(initial=0)) + 1024
    indices, survivors = np.empty(most + _WORD, np.int32), np.empty(most + _WORD, np.float32)
    _topk_each(values, values.view(np.int32), ends, table, indices, survivors, out.numpy())


def sparse_mean(out: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor | None:
    """out = the mean of sparse vectors; None, with nothing written, if indices do not ascend or lie outside."""
    places = np.concatenate([i.numpy() for i in indices])
    starts = np.cumsum([0, *(i.numel() for i in indices)])
    if not _ascend(places, starts, out.numel()):
        return None
    largest, dense = torch.empty(1, dtype=torch.float32), out.detach().numpy()
    number, exact = divisor(len(indices))
    said = np.concatenate([v.detach().numpy() for v in values])
    bits = dense.view(np.int32)
    _sparse_mean(places, said, starts, number, exact, dense, bits, largest.numpy().view(np.int32))
    return largest


def scatter_add(out: Tensor, indices: Tensor, values: Tensor, weight: float) -> bool:
    return _scatter_add(out.detach().numpy(), indices.numpy(), values.detach().numpy(), np.float32(weight))


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
def _flag(bits: Ints, bar: np.int32, flags: Bytes) -> None:
    wide()
    for j in range(bits.size):
        flags[j] = np.int32(bits[j] & np.int32(0x7FFFFFFF)) >= bar


@kernel
def _compact(x: Floats, bits: Ints, bar: np.int32, most: int, indices: Ints, values: Floats) -> int:
    """Write the elements that reach the threshold, with their positions; stops soon after `most` of them."""
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
                word = words[w]
                while word != np.uint64(0):  # a flag is one bit of its byte, and the first flag's byte the lowest
                    j = lo + _WORD * w + np.int64(lowest_bit(word) >> np.uint64(3))
                    indices[count] = j
                    values[count] = x[j]
                    count += 1
                    word &= np.uint64(word - np.uint64(1))
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


@kernel
def _topk_each(x: Floats, bits: Ints, edges: Longs, counts: Longs, indices: Ints, survivors: Floats, out: Ints) -> None:
    """The largest of every segment: of those that reach a threshold, or of all where the sample was no guide, as of many zeros."""
    done = 0
    for s in range(counts.size):
        a, b, k = edges[s], edges[s + 1], counts[s]
        if k == 0:
            continue
        count = 0
        most = 4 * k + 1024
        if b - a > _SHORT and k * _DENSE <= b - a:
            count = _compact(x[a:b], bits[a:b], _bar(bits[a:b], k), most, indices, survivors)
        if k <= count <= most:
            keys = _keys(survivors[:count].view(np.int32))
            best = _pick(keys, _kth(keys, k), k)
            for j in range(k):
                out[done + j] = a + indices[best[j]]
        else:
            keys = _keys(bits[a:b])
            best = _pick(keys, _kth(keys, k), k)
            for j in range(k):
                out[done + j] = a + best[j]
        done += k


@kernel
def _bar(bits: Ints, k: int) -> np.int32:
    """A magnitude that more than k elements reach, estimated from a sample."""
    n = bits.size
    stride = max(n // min(n // 64, 200 * n // k), 1)
    sample = np.empty((n + stride - 1) // stride, np.int32)
    for j in range(sample.size):
        sample[j] = bits[j * stride]
    keys = _keys(sample)
    expected = k * keys.size / n
    rank = min(int(expected + 4.0 * expected**0.5) + 4, keys.size)
    return _kth(keys, rank)


@kernel
def _kth(keys: Ints, k: int) -> np.int32:
    """The k-th largest, found bit by bit from the top: counting vectorises, sorting does not."""
    found = np.int32(0)
    for bit in range(30, -1, -1):
        bar = np.int32(found | np.int32(np.int32(1) << np.int32(bit)))
        if _count(keys, bar) >= k:
            found = bar
    return found


@kernel
def _count(keys: Ints, bar: np.int32) -> np.int32:
    wide()
    count = np.int32(0)
    for j in range(keys.size):
        count += np.int32(keys[j] >= bar)
    return count


@kernel
def _ascend(indices: Ints, starts: Longs, n: int) -> bool:
    for w in range(starts.size - 1):
        last = np.int32(0)
        for j in range(starts[w], starts[w + 1]):
            if indices[j] < last or indices[j] >= n:
                return False
            last = indices[j]
    return True


@kernel
def _sparse_mean(
    indices: Ints, values: Floats, starts: Longs, number: np.float32, exact: bool, out: Floats, bits: Ints, top: Ints
) -> None:
    at = starts[:-1].copy()
    best = np.int32(0)
    for lo in range(0, out.size, _STRETCH):
        hi = min(lo + _STRETCH, out.size)
        prefetch(out, hi, hi + _STRETCH)
        out[lo:hi] = np.float32(0)
        for w in range(at.size):
            j = at[w]
            while j < starts[w + 1] and indices[j] < hi:
                out[indices[j]] += values[j]
                j += 1
            at[w] = j
        divide_all(out[lo:hi], number, exact)
        best = max(best, top_bits(bits[lo:hi]))
    top[0] = best
