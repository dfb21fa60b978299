"""Base-3 coding: a few blocks at a time are rounded into a buffer that stays in L1, then folded five to a byte."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Blocks, Bytes, Floats, Longs, Rows, kernel
from gossamer.kernels.cpu.hashing import start
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.cpu.rounding import round_codes
from gossamer.kernels.layout import ONE, TERNARY_BLOCK, TRITS, edges, ternary_bytes

_WIDTH = TERNARY_BLOCK // TRITS
_CHUNK = 4 * TERNARY_BLOCK


def encode(x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], offset: int) -> Tensor:
    wire = torch.empty(ternary_bytes(x.numel()), dtype=torch.uint8)
    counter, k1 = start(key, offset)
    _encode(x.detach().numpy(), edges(bounds), gains.numpy(), counter, k1, wire.numpy())
    return wire


def levels(
    x: Tensor, bounds: tuple[int, ...], gains: Tensor, key: tuple[int, int], top: int, offset: int
) -> Tensor:
    out = torch.empty(x.numel(), dtype=torch.int8)
    counter, k1 = start(key, offset)
    codes = out.numpy().view(np.uint8)
    _levels(x.detach().numpy(), edges(bounds), gains.numpy(), np.int32(top * ONE), counter, k1, codes)
    return out


def accumulate(wire: Tensor, bounds: tuple[int, ...], units: Tensor, out: Tensor) -> None:
    _accumulate(wire.numpy(), edges(bounds), units.numpy(), out.detach().numpy())


@kernel
def _levels(
    x: Floats, edges: Longs, gains: Floats, top: np.int32, counter: np.uint32, k1: np.uint32, out: Bytes
) -> None:
    wide()
    for i in range(gains.size):
        for a in range(edges[i], edges[i + 1], _CHUNK):
            b = min(a + _CHUNK, edges[i + 1])
            prefetch(x, b, b + _CHUNK)
            here = np.uint32(counter + np.uint32(a))
            round_codes(x[a:b], gains[i], top, np.int32(0), here, k1, out[a:b])


@kernel
def _encode(x: Floats, edges: Longs, gains: Floats, counter: np.uint32, k1: np.uint32, wire: Bytes) -> None:
    wide()
    one = np.int32(ONE)
    trits = np.zeros(_CHUNK, np.uint8)
    segment = 0
    for lo in range(0, x.size, _CHUNK):
        hi = min(lo + _CHUNK, x.size)
        prefetch(x, hi, hi + _CHUNK)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            here = np.uint32(counter + np.uint32(a))
            round_codes(x[a:b], gains[segment], one, one, here, k1, trits[a - lo : b - lo])
            a = b
        _fold_chunk(trits, hi - lo, wire[lo // TRITS : -(-hi // TRITS)])


@kernel
def _fold_chunk(trits: Bytes, n: int, wire: Bytes) -> None:
    full = n // TERNARY_BLOCK
    cut, done = full * TERNARY_BLOCK, full * _WIDTH
    _fold(trits[:cut].reshape(full, TRITS, _WIDTH), wire[:done].reshape(full, _WIDTH))
    if cut < n:
        width = wire.size - done
        trits[n:] = 0
        _fold(trits[cut : cut + TRITS * width].reshape(1, TRITS, width), wire[done:].reshape(1, width))


@kernel
def _fold(trits: Blocks, wire: Rows) -> None:
    wide()
    for b in range(wire.shape[0]):
        for j in range(wire.shape[1]):
            value = np.uint16(trits[b, 0, j])
            for i in range(1, TRITS):
                value = np.uint16(np.uint16(value * np.uint16(3)) + np.uint16(trits[b, i, j]))
            wire[b, j] = np.uint8(np.uint16(np.uint16(value << np.uint16(8)) + np.uint16(242)) // np.uint16(243))


@kernel
def _unfold(wire: Rows, trits: Blocks) -> None:
    wide()
    for b in range(wire.shape[0]):
        power = np.uint16(1)
        for i in range(TRITS):
            for j in range(wire.shape[1]):
                shifted = np.uint16(np.uint16(np.uint16(wire[b, j]) * power) & np.uint16(255))
                trits[b, i, j] = np.uint8(np.uint16(shifted * np.uint16(3)) >> np.uint16(8))
            power = np.uint16(power * np.uint16(3))


@kernel
def _unfold_chunk(wire: Bytes, trits: Bytes, n: int) -> None:
    full = n // TERNARY_BLOCK
    cut, done = full * TERNARY_BLOCK, full * _WIDTH
    _unfold(wire[:done].reshape(full, _WIDTH), trits[:cut].reshape(full, TRITS, _WIDTH))
    width = wire.size - done
    if width:
        _unfold(wire[done:].reshape(1, width), trits[cut : cut + TRITS * width].reshape(1, TRITS, width))


@kernel
def _accumulate(wire: Bytes, edges: Longs, units: Floats, out: Floats) -> None:
    wide()
    trits = np.empty(_CHUNK, np.uint8)
    segment = 0
    for lo in range(0, out.size, _CHUNK):
        hi = min(lo + _CHUNK, out.size)
        prefetch(out, hi, hi + _CHUNK)
        _unfold_chunk(wire[lo // TRITS : -(-hi // TRITS)], trits, hi - lo)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            _add(out[a:b], trits[a - lo : b - lo], units[segment])
            a = b


@kernel
def _add(out: Floats, trits: Bytes, unit: np.float32) -> None:
    wide()
    for j in range(out.size):
        out[j] += unit * np.float32(np.int32(trits[j]) - np.int32(1))
