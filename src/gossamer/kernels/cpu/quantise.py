"""Uniform levels per bucket: rounds each block of 512 into a buffer in L1, then packs it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, kernel
from gossamer.kernels.cpu.hashing import start
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.cpu.planes import BLOCKS, CHUNK, full_rows, pack, pack_tail, unpack_blocks, unpack_tail
from gossamer.kernels.cpu.rounding import gain_of, round_codes, unit_of
from gossamer.kernels.cpu.scales import top_bits
from gossamer.kernels.layout import GUARD, ONE, PLANE_BLOCK, levels_of

Say = Callable[[Floats, int, int, Bytes, int, np.float32, np.int32, np.int32], None]


def max_norms(x: Tensor, bucket: int) -> Tensor:
    out = torch.empty(-(-x.numel() // bucket), dtype=torch.float32)
    _max_norms(x.detach().numpy().view(np.int32), bucket, out.numpy().view(np.int32))
    return out


def encode(x: Tensor, bits: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int, wire: Tensor) -> None:
    top = np.int32(ONE // 2 if bits == 1 else levels_of(bits) * ONE)
    counter, k1 = start(key, offset)
    _encode(x.detach().numpy(), bits, bucket, gains.numpy(), top, counter, k1, wire.numpy())


def measure_and_encode(
    x: Tensor, bits: int, bucket: int, top: float, key: tuple[int, int], offset: int, norms: Tensor, wire: Tensor
) -> None:
    values, (counter, k1) = x.detach().numpy(), start(key, offset)
    gain, limit = np.float32(top * GUARD), np.int32(top * ONE)
    magnitudes = norms.numpy().view(np.int32)
    _measure_and_encode(
        values, values.view(np.int32), bits, bucket, gain, limit, counter, k1, norms.numpy(), magnitudes, wire.numpy()
    )


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    scale, shift = (2, 1) if bits == 1 else (1, levels_of(bits))
    said, factor, top = norms.numpy(), np.float32(weight), np.float32(levels_of(bits))
    _read(wire.numpy(), bits, bucket, said, factor, top, np.int32(scale), np.int32(shift), out.detach().numpy(), anew)


@kernel
def _max_norms(bits: Ints, bucket: int, out: Ints) -> None:
    for i in range(out.size):
        out[i] = top_bits(bits[i * bucket : (i + 1) * bucket])


@kernel
def _encode(
    x: Floats, bits: int, bucket: int, gains: Floats, top: np.int32, counter: np.uint32, k1: np.uint32, wire: Bytes
) -> None:
    wide()
    rows = full_rows(wire, bits, x.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, x.size, CHUNK):
        hi = min(lo + CHUNK, x.size)
        a = lo
        while a < hi:
            i = a // bucket
            b = min(hi, (i + 1) * bucket)
            prefetch(x, a + CHUNK, b + CHUNK)
            round_codes(x, a, b, gains[i], top, top, counter, k1, codes, a - lo)
            a = b
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _measure_and_encode(
    x: Floats,
    magnitudes: Ints,
    bits: int,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    counter: np.uint32,
    k1: np.uint32,
    norms: Floats,
    tops: Ints,
    wire: Bytes,
) -> None:
    wide()
    rows = full_rows(wire, bits, x.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    factor = np.float32(0)
    for lo in range(0, x.size, CHUNK):
        hi = min(lo + CHUNK, x.size)
        a = lo
        while a < hi:
            i = a // bucket
            if a == i * bucket:
                tops[i] = top_bits(magnitudes[a : a + bucket])
                factor = gain_of(norms[i], gain)
            b = min(hi, (i + 1) * bucket)
            prefetch(x, a + CHUNK, b + CHUNK)
            round_codes(x, a, b, factor, top, top, counter, k1, codes, a - lo)
            a = b
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(
    wire: Bytes,
    bits: int,
    bucket: int,
    norms: Floats,
    weight: np.float32,
    top: np.float32,
    scale: np.int32,
    shift: np.int32,
    out: Floats,
    anew: bool,
) -> None:
    wide()
    rows = full_rows(wire, bits, out.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, out.size, CHUNK):
        hi = min(lo + CHUNK, out.size)
        unpack_blocks(rows, lo // PLANE_BLOCK, bits, blocks, (hi - lo) // PLANE_BLOCK)
        if hi - lo < CHUNK:
            unpack_tail(wire, bits, codes, out.size)
        a = lo
        while a < hi:
            i = a // bucket
            b = min(hi, (i + 1) * bucket)
            prefetch(out, a + CHUNK, b + CHUNK)
            unit = unit_of(norms[i], weight, top)
            if anew:
                say_first(out, a, b, codes, a - lo, unit, scale, shift)
            else:
                say_again(out, a, b, codes, a - lo, unit, scale, shift)
            a = b


def _reader(anew: bool) -> Say:
    """Compile a reader that writes decoded codes to `out`, or adds them.

    A reader that writes adds to 0.0, so that there is no -0.0.
    """

    @kernel
    def say(
        out: Floats, a: int, b: int, codes: Bytes, begin: int, unit: np.float32, scale: np.int32, shift: np.int32
    ) -> None:
        wide()
        for j in range(b - a):
            level = np.int32(np.int32(np.int32(codes[np.uint64(begin + j)]) * scale) - shift)
            old = np.float32(0) if anew else out[np.uint64(a + j)]
            out[np.uint64(a + j)] = old + unit * np.float32(level)

    return say


say_first, say_again = _reader(True), _reader(False)
