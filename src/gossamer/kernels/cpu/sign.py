"""Sign bits, and the lengths of segments: works on a few blocks of 512 elements at a time, which stay in L1."""

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Doubles, Floats, Longs, Rows, Stack, inlined, kernel, prefetch, wide
from gossamer.kernels.cpu.planes import BLOCKS, CHUNK, full_rows, unpack_blocks, unpack_tail
from gossamer.kernels.cpu.scales import piece
from gossamer.kernels.layout import PLANE_BLOCK, SUM_GROUP, Bounds, edges

_CHUNK = SUM_GROUP // 4  # elements that are measured, then packed


def encode(x: Tensor, bounds: Bounds, power: int, out: Tensor) -> Tensor:
    scales = torch.empty(len(bounds) - 1, dtype=torch.float32)
    _encode(x.detach().numpy(), edges(bounds), power, out.numpy(), scales.numpy())
    return scales


def read(wire: Tensor, bounds: Bounds, units: Tensor, out: Tensor, anew: bool) -> None:
    _read(wire.numpy(), edges(bounds), units.numpy(), out.detach().numpy(), anew)


@kernel
def _encode(x: Floats, edges: Longs, power: int, wire: Bytes, scales: Floats) -> None:
    wide()
    full = x.size // PLANE_BLOCK
    blocks, rows = x[: full * PLANE_BLOCK].reshape(full, 8, 64), full_rows(wire, 1, x.size)
    done = 0
    for i in range(scales.size):
        a, b = edges[i], edges[i + 1]
        sums = np.zeros((max(-(-(b - a) // SUM_GROUP), 1), 64), np.float64)
        for lo in range(a, b, _CHUNK):
            hi = min(lo + _CHUNK, b)
            prefetch(x, hi, hi + _CHUNK)
            if power == 1:  # the sum is compiled for each
                _sum(x[lo:hi], sums, (lo - a) // SUM_GROUP, 1)
            else:
                _sum(x[lo:hi], sums, (lo - a) // SUM_GROUP, 2)
            ready = hi // PLANE_BLOCK
            _pack(blocks, rows, done, ready)
            done = ready
        mean = _total(sums) / max(b - a, 1)
        scales[i] = np.float32(mean if power == 1 else np.sqrt(mean))
    _pack_rest(x, wire, rows.size)


@kernel
def _pack_rest(x: Floats, wire: Bytes, written: int) -> None:
    """Pack the last block, which is not full."""
    rest = x.size % PLANE_BLOCK
    if rest:
        width = wire.size - written
        padded = np.full(8 * width, np.float32(-1))
        padded[:rest] = x[x.size - rest :]
        _pack(padded.reshape(1, 8, width), wire[written:].reshape(1, width), 0, 1)


@kernel
def _sum(x: Floats, sums: Doubles, group: int, power: int) -> None:
    """Adds rows of 64 magnitudes one after another, or their squares, which are exact in double precision."""
    wide()
    inlined()
    whole = x.size // 64
    rows = x[: whole * 64].reshape(whole, 64)
    eights = whole // 8 * 8
    for i in range(0, eights, 8):
        for j in range(64):
            total = sums[group, j]
            for k in range(8):
                total += _powered(rows[i + k, j], power)
            sums[group, j] = total
    for i in range(eights, whole):
        for j in range(64):
            sums[group, j] += _powered(rows[i, j], power)
    for j in range(x.size - whole * 64):
        sums[group, j] += _powered(x[whole * 64 + j], power)


@kernel
def _powered(x: np.float32, power: int) -> np.float64:
    inlined()
    magnitude = np.float64(np.abs(x))
    return magnitude if power == 1 else magnitude * magnitude


@kernel
def _total(sums: Doubles) -> float:
    """Pairwise sum, as if padded with zeros to a power of two: first over groups, then over the 64 lanes."""
    half = 1
    while half * 2 < sums.shape[0]:
        half *= 2
    while half >= 1:
        for i in range(min(half, sums.shape[0] - half)):
            for j in range(64):
                sums[i, j] += sums[i + half, j]
        half //= 2
    half = 32
    while half >= 1:
        for j in range(half):
            sums[0, j] += sums[0, j + half]
        half //= 2
    return sums[0, 0]


@kernel
def _pack(x: Stack, wire: Rows, first: int, last: int) -> None:
    wide()
    for b in range(first, last):
        for j in range(wire.shape[1]):
            byte = np.uint8(0)
            for i in range(8):
                byte |= np.uint8(np.uint8(x[b, i, j] >= np.float32(0)) << np.uint8(i))
            wire[b, j] = byte


@kernel
def _read(wire: Bytes, edges: Longs, units: Floats, out: Floats, anew: bool) -> None:
    wide()
    rows = full_rows(wire, 1, out.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    i = 0
    for lo in range(0, out.size, CHUNK):
        b, hi = lo, min(lo + CHUNK, out.size)
        prefetch(out, hi, hi + CHUNK)
        unpack_blocks(rows, lo // PLANE_BLOCK, 1, blocks, (hi - lo) // PLANE_BLOCK)
        if hi - lo < CHUNK:
            unpack_tail(wire, 1, codes, out.size)
        while b < hi:
            i, a, b = piece(edges, i, b, hi)
            if anew:
                _put(out, a, b, codes, a - lo, units[i])
            else:
                _add(out, a, b, codes, a - lo, units[i])


@kernel
def _put(out: Floats, a: int, b: int, codes: Bytes, begin: int, unit: np.float32) -> None:
    wide()
    for j in range(b - a):
        out[np.uint64(a + j)] = unit if codes[np.uint64(begin + j)] else -unit


@kernel
def _add(out: Floats, a: int, b: int, codes: Bytes, begin: int, unit: np.float32) -> None:
    wide()
    for j in range(b - a):
        out[np.uint64(a + j)] += unit if codes[np.uint64(begin + j)] else -unit
