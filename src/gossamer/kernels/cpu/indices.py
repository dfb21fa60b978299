"""Rice coding of gaps on 64-bit words."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Ints, Longs, kernel, lowest_bit
from gossamer.kernels.layout import INDEX_BLOCK

Words = npt.NDArray[np.uint64]
_PARAMETERS = 32


def encode(indices: Tensor, n: int) -> Tensor:
    values = indices.numpy()
    rice = np.empty(-(-values.size // INDEX_BLOCK), np.uint8)
    low_bits, unary_bits = _measure(values, rice)
    low_bytes, unary_bytes = -(-low_bits // 8), -(-unary_bits // 8)
    if rice.size + low_bytes + unary_bytes >= 4 * values.size:
        return torch.cat([torch.zeros(1, dtype=torch.uint8), indices.view(torch.uint8)])
    low, unary = np.zeros(low_bits // 64 + 2, np.uint64), np.zeros(unary_bits // 64 + 1, np.uint64)
    _write(values, rice, low, unary)
    wire = np.empty(1 + rice.size + low_bytes + unary_bytes, np.uint8)
    wire[0] = 1
    wire[1 : 1 + rice.size] = rice
    wire[1 + rice.size : wire.size - unary_bytes] = low.view(np.uint8)[:low_bytes]
    wire[wire.size - unary_bytes :] = unary.view(np.uint8)[:unary_bytes]
    return torch.from_numpy(wire)


def decode(wire: Tensor, count: int, n: int) -> Tensor | None:
    raw = wire.numpy()
    blocks = -(-count // INDEX_BLOCK)
    rice = raw[1 : 1 + blocks]
    if rice.size < blocks or np.any(rice >= _PARAMETERS):
        return None
    low_end = 1 + blocks + -(-_low_bits(rice, count) // 8)
    if raw.size < low_end:
        return None
    indices = np.empty(count, np.int32)
    low, unary = _words(raw[1 + blocks : low_end]), _words(raw[low_end:])
    ones_end = _read(rice, low, unary, n, indices)
    return torch.from_numpy(indices) if ones_end >= 0 and -(-ones_end // 8) == raw.size - low_end else None


def _words(raw: Bytes) -> Words:
    """The bytes as words, padded by one word."""
    words = np.zeros(raw.size // 8 + 2, np.uint64)
    words.view(np.uint8)[: raw.size] = raw
    return words


@kernel
def _gaps(indices: Ints, start: int, gaps: Longs) -> int:
    stop = min(start + INDEX_BLOCK, indices.size)
    before = np.int64(indices[start - 1]) if start else np.int64(-1)
    gaps[0] = np.int64(indices[start]) - before - 1
    for j in range(start + 1, stop):
        gaps[j - start] = np.int64(indices[j]) - np.int64(indices[j - 1]) - 1
    return stop - start


@kernel
def parameter(numbers: Longs | Bytes, most: int) -> int:
    """The smallest Rice parameter r at which one more bit per number no longer pays; the cost is convex in r."""
    low, high = 0, most
    while low < high:
        r = (low + high) // 2
        saved = np.int64(0)
        for j in range(numbers.size):
            saved += ((numbers[j] >> r) + 1) >> 1
        if saved <= numbers.size:
            high = r
        else:
            low = r + 1
    return low


@kernel
def _measure(indices: Ints, rice: Bytes) -> tuple[int, int]:
    gaps = np.empty(INDEX_BLOCK, np.int64)
    low, unary = 0, indices.size
    for block in range(rice.size):
        size = _gaps(indices, block * INDEX_BLOCK, gaps)
        r = parameter(gaps[:size], _PARAMETERS - 1)
        rice[block] = r
        low += r * size
        for j in range(size):
            unary += gaps[j] >> r
    return low, unary


@kernel
def _write(indices: Ints, rice: Bytes, low: Words, unary: Words) -> None:
    gaps = np.empty(INDEX_BLOCK, np.int64)
    at, end = 0, -1
    for block in range(rice.size):
        size = _gaps(indices, block * INDEX_BLOCK, gaps)
        r = np.int64(rice[block])
        for j in range(size):
            part = np.uint64(gaps[j] & ((1 << r) - 1))
            word, bit = at >> 6, np.uint64(at & 63)
            low[word] |= part << bit
            low[word + 1] |= (part >> np.uint64(1)) >> (np.uint64(63) - bit)
            at += r
            end += (gaps[j] >> r) + 1
            unary[end >> 6] |= np.uint64(1) << np.uint64(end & 63)


@kernel
def _low_bits(rice: Bytes, count: int) -> int:
    bits = 0
    for block in range(rice.size):
        bits += np.int64(rice[block]) * min(INDEX_BLOCK, count - block * INDEX_BLOCK)
    return int(bits)


@kernel
def _read(rice: Bytes, low: Words, unary: Words, n: int, indices: Ints) -> int:
    """Decode indices, and return the bits used of the unary stream; -1 if it does not hold indices.size indices below n."""
    count, at = 0, 0
    index, end = np.int64(-1), np.int64(-1)
    for w in range(unary.size):
        rest = unary[w]
        while rest != np.uint64(0):
            if count == indices.size:
                return -1
            here = 64 * w + np.int64(lowest_bit(rest))
            r = np.int64(rice[count // INDEX_BLOCK])
            quotient = here - end - 1
            if quotient > n >> r:
                return -1
            word, bit = at >> 6, np.uint64(at & 63)
            part = (low[word] >> bit) | ((low[word + 1] << np.uint64(1)) << (np.uint64(63) - bit))
            index += (quotient << r) + np.int64(part & np.uint64((1 << r) - 1)) + 1
            if index >= n:
                return -1
            indices[count] = index
            rest &= np.uint64(rest - np.uint64(1))
            at, end, count = at + r, here, count + 1
    return int(end + 1) if count == indices.size else -1
