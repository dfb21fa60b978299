"""Sign bits with error feedback: 512 elements at a time, so that all but the first touch is in L1."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Doubles, Floats, Longs, Rows, kernel
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.cpu.planes import CHUNK, unpack_chunk
from gossamer.kernels.layout import PLANE_BLOCK, edges, plane_bytes

Stack = Floats  # three dimensions: (blocks, 8, width)


def feedback(g: Tensor, pending: Tensor, scales_prev: Tensor, bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    wire = torch.empty(plane_bytes(g.numel(), 1), dtype=torch.uint8)
    scales = torch.empty(len(bounds) - 1)
    kept = pending.detach().numpy()
    _feedback(
        g.detach().numpy(), kept, scales_prev.numpy(), edges(bounds), wire.numpy(), scales.numpy()
    )
    return wire, scales


def accumulate(wire: Tensor, bounds: tuple[int, ...], units: Tensor, out: Tensor) -> None:
    _accumulate(wire.numpy(), edges(bounds), units.numpy(), out.detach().numpy())


@kernel
def _feedback(g: Floats, pending: Floats, said: Floats, edges: Longs, wire: Bytes, scales: Floats) -> None:
    wide()
    lanes = np.empty(64, np.float64)
    padded = np.zeros(PLANE_BLOCK, np.float32)
    packed = 0
    for i in range(said.size):
        a, b = edges[i], edges[i + 1]
        sums = np.empty(-(-(b - a) // PLANE_BLOCK), np.float64)
        for lo in range(a, b, CHUNK):
            hi = min(lo + CHUNK, b)
            prefetch(g, hi, hi + CHUNK)
            prefetch(pending, hi, hi + CHUNK)
            _step(g[lo:hi], pending[lo:hi], said[i])
            for left in range(lo, hi, PLANE_BLOCK):
                block = pending[left : min(left + PLANE_BLOCK, hi)]
                if block.size < PLANE_BLOCK:
                    padded[: block.size] = block
                    padded[block.size :] = np.float32(0)
                    block = padded
                sums[(left - a) // PLANE_BLOCK] = _sum(block, lanes)
            ready = hi // PLANE_BLOCK * PLANE_BLOCK
            if ready > packed:
                count = (ready - packed) // PLANE_BLOCK
                blocks = pending[packed:ready].reshape(count, 8, 64)
                _pack(blocks, wire[packed // 8 : ready // 8].reshape(count, 64))
                packed = ready
        scales[i] = np.float32(_halve(sums) / (b - a)) if b > a else np.float32(0)
    if packed < g.size:
        width = wire.size - packed // 8
        padded[: g.size - packed] = pending[packed:]
        padded[g.size - packed :] = np.float32(-1)
        _pack(padded[: 8 * width].reshape(1, 8, width), wire[packed // 8 :].reshape(1, width))


@kernel
def _step(g: Floats, pending: Floats, said: np.float32) -> None:
    wide()
    for j in range(g.size):
        kept = pending[j] - (said if pending[j] >= np.float32(0) else -said)
        pending[j] = kept + g[j]


@kernel
def _sum(x: Floats, lanes: Doubles) -> float:
    wide()
    for j in range(64):
        total = np.float64(np.abs(x[j]))
        for i in range(1, 8):
            total += np.float64(np.abs(x[j + 64 * i]))
        lanes[j] = total
    return _halve(lanes)


@kernel
def _halve(x: Doubles) -> float:
    """Sum by adding halves onto halves, as if x were padded with zeros to a power of two; destroys x."""
    half = 1
    while half * 2 < x.size:
        half *= 2
    while half >= 1:
        for j in range(min(half, x.size - half)):
            x[j] += x[j + half]
        half //= 2
    return x[0]


@kernel
def _pack(x: Stack, wire: Rows) -> None:
    wide()
    for b in range(wire.shape[0]):
        for j in range(wire.shape[1]):
            byte = np.uint8(0)
            for i in range(8):
                byte |= np.uint8(np.uint8(x[b, i, j] >= np.float32(0)) << np.uint8(i))
            wire[b, j] = byte


@kernel
def _accumulate(wire: Bytes, edges: Longs, units: Floats, out: Floats) -> None:
    wide()
    codes = np.zeros(CHUNK, np.uint8)
    segment = 0
    for lo in range(0, out.size, CHUNK):
        hi = min(lo + CHUNK, out.size)
        prefetch(out, hi, hi + CHUNK)
        unpack_chunk(wire[lo // 8 :], 1, hi - lo, codes)
        a = lo
        while a < hi:
            while edges[segment + 1] <= a:
                segment += 1
            b = min(hi, edges[segment + 1])
            _add(out[a:b], codes[a - lo : b - lo], units[segment])
            a = b


@kernel
def _add(out: Floats, codes: Bytes, unit: np.float32) -> None:
    wide()
    for j in range(out.size):
        out[j] += unit if codes[j] else -unit
