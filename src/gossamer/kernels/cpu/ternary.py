"""Base-3 coding: rounds a few blocks at a time into a buffer in L1, then packs five trits per byte."""

import numpy as np
import torch
from torch import Tensor

from gossamer.core.memory_pool import uninitialised
from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Blocks, Bytes, Floats, Ints, Longs, Rows, kernel, prefetch, wide
from gossamer.kernels.cpu.hashing import Start, gain_of, read_codes, round_codes, start, unit_of
from gossamer.kernels.cpu.scales import piece, top_and_rms, top_bits
from gossamer.kernels.layout import GUARD, ONE, TERNARY_BLOCK, TRITS, Bounds, edges

_WIDTH = TERNARY_BLOCK // TRITS
_BLOCKS = 8
_CHUNK = _BLOCKS * TERNARY_BLOCK


def encode(x: Tensor, bounds: Bounds, scales: Tensor, clip: float | None, key: Key, wire: Tensor) -> None:
    values, said = x.detach().numpy(), scales.numpy()
    bits, magnitudes = values.view(np.int32), said.view(np.int32)
    limit = None if clip is None else np.float32(clip)
    _encode(values, bits, edges(bounds), limit, start(key), said, magnitudes, wire.numpy())


def levels(x: Tensor, bounds: Bounds, gains: Tensor, key: Key, top: int) -> Tensor:
    out = uninitialised(x.numel(), x.device)
    _levels(x.detach().numpy(), edges(bounds), gains.numpy(), np.int32(top * ONE), start(key), out.numpy())
    return out.view(torch.int8)


def read(wire: Tensor, bounds: Bounds, scales: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    _read(wire.numpy(), edges(bounds), scales.numpy(), np.float32(weight), out.detach().numpy(), anew)


@kernel
def _levels(x: Floats, edges: Longs, gains: Floats, top: np.int32, key: Start, out: Bytes) -> None:
    wide()
    for i in range(gains.size):
        for a in range(edges[i], edges[i + 1], _CHUNK):
            b = min(a + _CHUNK, edges[i + 1])
            prefetch(x, b, b + _CHUNK)
            round_codes(x, a, b, gains[i], top, np.int32(0), key, out, a)


@kernel  # once for scales that are given, and once for those that are measured
def _encode(
    x: Floats,
    bits: Ints,
    edges: Longs,
    clip: np.float32 | None,
    key: Start,
    scales: Floats,
    magnitudes: Ints,
    wire: Bytes,
) -> None:
    """With `clip`, measure each segment just before it is encoded, so that a short segment is still in cache."""
    wide()
    one = np.int32(ONE)
    full = x.size // TERNARY_BLOCK
    rows = wire[: full * _WIDTH].reshape(full, _WIDTH)
    trits = np.zeros(_CHUNK, np.uint8)
    blocks = trits.reshape(_BLOCKS, TRITS, _WIDTH)
    if clip is not None:
        scales[:] = np.float32(0)
    i = 0
    for lo in range(0, x.size, _CHUNK):
        b, hi = lo, min(lo + _CHUNK, x.size)
        prefetch(x, hi, hi + _CHUNK)
        while b < hi:
            i, a, b = piece(edges, i, b, hi)
            if clip is not None and a == edges[i]:
                _measure(x[a : edges[i + 1]], bits[a : edges[i + 1]], clip, scales, magnitudes, i)
            gain = gain_of(scales[i], np.float32(GUARD))
            round_codes(x, a, b, gain, one, one, key, trits, a - lo)
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
def _unfold_rest(wire: Bytes, trits: Bytes, size: int) -> None:
    """Unpack the last block of a chunk of `size` elements, if it is not full."""
    begin = size // TERNARY_BLOCK * TERNARY_BLOCK
    width = (size - begin + TRITS - 1) // TRITS
    if width:
        tail = trits[begin : begin + TRITS * width].reshape(1, TRITS, width)
        _unfold(wire[wire.size - width :].reshape(1, width), 0, tail, 1)


@kernel
def _read(wire: Bytes, edges: Longs, scales: Floats, weight: np.float32, out: Floats, anew: bool) -> None:
    wide()
    full = out.size // TERNARY_BLOCK
    rows = wire[: full * _WIDTH].reshape(full, _WIDTH)
    trits = np.zeros(_CHUNK, np.uint8)
    blocks = trits.reshape(_BLOCKS, TRITS, _WIDTH)
    i = 0
    for lo in range(0, out.size, _CHUNK):
        b, hi = lo, min(lo + _CHUNK, out.size)
        prefetch(out, hi, hi + _CHUNK)
        _unfold(rows, lo // TERNARY_BLOCK, blocks, (hi - lo) // TERNARY_BLOCK)
        if hi - lo < _CHUNK:
            _unfold_rest(wire, trits, hi - lo)
        while b < hi:
            i, a, b = piece(edges, i, b, hi)
            read_codes(trits, a - lo, np.int32(1), unit_of(scales[i], weight, np.float32(1)), out, a, b, anew)
