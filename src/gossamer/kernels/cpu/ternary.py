"""Base-3 coding: rounds a few blocks at a time into a buffer in L1, then packs five trits per byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gossamer.core.memory_pool import uninitialised
from gossamer.kernels.cpu.compile import Blocks, Bytes, Floats, Ints, Longs, Rows, kernel
from gossamer.kernels.cpu.hashing import start
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.cpu.rounding import gain_of, round_codes, unit_of
from gossamer.kernels.cpu.scales import top_and_rms, top_bits
from gossamer.kernels.layout import GUARD, ONE, TERNARY_BLOCK, TRITS, edges

Say = Callable[[Floats, int, int, Bytes, int, np.float32], None]

_WIDTH = TERNARY_BLOCK // TRITS
_BLOCKS = 8
_CHUNK = _BLOCKS * TERNARY_BLOCK


def encode(x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], offset: int, wire: Tensor) -> None:
    counter, k1 = start(key, offset)
    _encode(x.detach().numpy(), edges(bounds), gains.numpy(), counter, k1, wire.numpy())


def measure_and_encode(
    x: Tensor, bounds: tuple[int, ...], clip: float, key: tuple[int, int], offset: int, scales: Tensor, wire: Tensor
) -> None:
    values, said, (counter, k1) = x.detach().numpy(), scales.numpy(), start(key, offset)
    bits, magnitudes = values.view(np.int32), said.view(np.int32)
    _measure_and_encode(values, bits, edges(bounds), np.float32(clip), counter, k1, said, magnitudes, wire.numpy())


def levels(x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], top: int, offset: int) -> Tensor:
    out = uninitialised(x.numel(), x.device)
    counter, k1 = start(key, offset)
    _levels(x.detach().numpy(), edges(bounds), gains.numpy(), np.int32(top * ONE), counter, k1, out.numpy())
    return out.view(torch.int8)


def read(wire: Tensor, bounds: tuple[int, ...], scales: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    _read(wire.numpy(), edges(bounds), scales.numpy(), np.float32(weight), out.detach().numpy(), anew)


@kernel
def _levels(
    x: Floats, edges: Longs, gains: Floats, top: np.int32, counter: np.uint32, k1: np.uint32, out: Bytes
) -> None:
    wide()
    for i in range(gains.size):
        for a in range(edges[i], edges[i + 1], _CHUNK):
            b = min(a + _CHUNK, edges[i + 1])
            prefetch(x, b, b + _CHUNK)
            round_codes(x, a, b, gains[i], top, np.int32(0), counter, k1, out, a)


@kernel
def _encode(x: Floats, edges: Longs, gains: Floats, counter: np.uint32, k1: np.uint32, wire: Bytes) -> None:
    wide()
    one = np.int32(ONE)
    full = x.size // TERNARY_BLOCK
    rows = wire[: full * _WIDTH].reshape(full, _WIDTH)
    trits = np.zeros(_CHUNK, np.uint8)
    blocks = trits.reshape(_BLOCKS, TRITS, _WIDTH)
    segment = 0
    for lo in range(0, x.size, _CHUNK):
        hi = min(lo + _CHUNK, x.size)
        prefetch(x, hi, hi + _CHUNK)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            round_codes(x, a, b, gains[segment], one, one, counter, k1, trits, a - lo)
            a = b
        _fold(blocks, (hi - lo) // TERNARY_BLOCK, rows, lo // TERNARY_BLOCK)
    _fold_rest(trits, x.size, wire)


@kernel
def _measure_and_encode(
    x: Floats,
    bits: Ints,
    edges: Longs,
    clip: np.float32,
    counter: np.uint32,
    k1: np.uint32,
    scales: Floats,
    magnitudes: Ints,
    wire: Bytes,
) -> None:
    """Measure each segment just before it is encoded, so that a short segment is still in cache."""
    wide()
    one, guard, gain = np.int32(ONE), np.float32(GUARD), np.float32(0)
    full = x.size // TERNARY_BLOCK
    rows = wire[: full * _WIDTH].reshape(full, _WIDTH)
    trits = np.zeros(_CHUNK, np.uint8)
    blocks = trits.reshape(_BLOCKS, TRITS, _WIDTH)
    scales[:] = np.float32(0)
    segment = 0
    for lo in range(0, x.size, _CHUNK):
        hi = min(lo + _CHUNK, x.size)
        prefetch(x, hi, hi + _CHUNK)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            if a == edges[segment]:
                _measure(x[a : edges[segment + 1]], bits[a : edges[segment + 1]], clip, scales, magnitudes, segment)
                gain = gain_of(scales[segment], guard)
            b = min(hi, edges[segment + 1])
            round_codes(x, a, b, gain, one, one, counter, k1, trits, a - lo)
            a = b
        _fold(blocks, (hi - lo) // TERNARY_BLOCK, rows, lo // TERNARY_BLOCK)
    _fold_rest(trits, x.size, wire)


@kernel
def _measure(x: Floats, bits: Ints, clip: np.float32, scales: Floats, magnitudes: Ints, segment: int) -> None:
    """Like `scales.clipped_scales`."""
    if clip == np.float32(0):
        magnitudes[segment] = top_bits(bits)
        return
    magnitudes[segment], rms = top_and_rms(x, bits)
    limit = np.float32(clip * rms)
    if rms > np.float32(0) and limit < scales[segment]:
        scales[segment] = limit


@kernel
def _fold_rest(trits: Bytes, n: int, wire: Bytes) -> None:
    """Pack the last block, which is not full."""
    full = n // TERNARY_BLOCK
    rest, done = n - full * TERNARY_BLOCK, full * _WIDTH
    if rest:
        begin, width = full % _BLOCKS * TERNARY_BLOCK, wire.size - done
        trits[begin + rest :] = 0
        tail = trits[begin : begin + TRITS * width].reshape(1, TRITS, width)
        _fold(tail, 1, wire[done:].reshape(1, width), 0)


@kernel
def _fold(trits: Blocks, count: int, wire: Rows, first: int) -> None:
    wide()
    for b in range(count):
        for j in range(wire.shape[1]):
            value = np.uint16(trits[b, 0, j])
            for i in range(1, TRITS):
                value = np.uint16(np.uint16(value * np.uint16(3)) + np.uint16(trits[b, i, j]))
            scaled = np.uint16(np.uint16(value << np.uint16(8)) + np.uint16(242))
            wire[first + b, j] = np.uint8(scaled // np.uint16(243))


@kernel
def _unfold(wire: Rows, first: int, trits: Blocks, count: int) -> None:
    wide()
    for b in range(count):
        power = np.uint16(1)
        for i in range(TRITS):
            for j in range(wire.shape[1]):
                shifted = np.uint16(np.uint16(np.uint16(wire[first + b, j]) * power) & np.uint16(255))
                trits[b, i, j] = np.uint8(np.uint16(shifted * np.uint16(3)) >> np.uint16(8))
            power = np.uint16(power * np.uint16(3))


@kernel
def _read(wire: Bytes, edges: Longs, scales: Floats, weight: np.float32, out: Floats, anew: bool) -> None:
    wide()
    full = out.size // TERNARY_BLOCK
    rows = wire[: full * _WIDTH].reshape(full, _WIDTH)
    trits = np.zeros(_CHUNK, np.uint8)
    blocks = trits.reshape(_BLOCKS, TRITS, _WIDTH)
    segment = 0
    for lo in range(0, out.size, _CHUNK):
        hi = min(lo + _CHUNK, out.size)
        prefetch(out, hi, hi + _CHUNK)
        _unfold(rows, lo // TERNARY_BLOCK, blocks, (hi - lo) // TERNARY_BLOCK)
        if hi - lo < _CHUNK and wire.size > rows.size:
            begin, width = full % _BLOCKS * TERNARY_BLOCK, wire.size - rows.size
            tail = trits[begin : begin + TRITS * width].reshape(1, TRITS, width)
            _unfold(wire[rows.size :].reshape(1, width), 0, tail, 1)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            unit = unit_of(scales[segment], weight, np.float32(1))
            if anew:
                _put(out, a, b, trits, a - lo, unit)
            else:
                _add(out, a, b, trits, a - lo, unit)
            a = b


def _reader(anew: bool) -> Say:
    """Compile a reader that writes decoded trits to `out`, or adds them.

    A reader that writes adds to 0.0, so that there is no -0.0.
    """

    @kernel
    def say(out: Floats, a: int, b: int, trits: Bytes, begin: int, unit: np.float32) -> None:
        wide()
        for j in range(b - a):
            trit = np.int32(np.int32(trits[np.uint64(begin + j)]) - np.int32(1))
            old = np.float32(0) if anew else out[np.uint64(a + j)]
            out[np.uint64(a + j)] = old + unit * np.float32(trit)

    return say


_put, _add = _reader(True), _reader(False)
