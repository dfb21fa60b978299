"""Uniform levels per bucket: rounds each block of 512 into a buffer in L1, then packs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.rng import Key, Keys
from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, Longs, inlined, kernel, prefetch, wide
from gossamer.kernels.cpu.hashing import gain_of, read_codes, round_codes, start, unit_of
from gossamer.kernels.cpu.planes import (
    BLOCKS,
    CHUNK,
    code_bytes,
    full_rows,
    pack,
    pack_tail,
    unpack_blocks,
    unpack_tail,
)
from gossamer.kernels.cpu.scales import top_bits
from gossamer.kernels.layout import GUARD, ONE, PLANE_BLOCK, levels_of, middle_of


def max_norms(x: Tensor, bucket: int) -> Tensor:
    out = torch.empty(-(-x.numel() // bucket), dtype=torch.float32)
    _max_norms(x.detach().numpy().view(np.int32), bucket, out.numpy().view(np.int32))
    return out


def encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> None:
    values, said, (counter, k1) = x.detach().numpy(), norms.numpy(), start(key)
    gain, top = np.float32(middle_of(bits) * GUARD), np.int32(middle_of(bits) * ONE)
    magnitudes, tops = values.view(np.int32), said.view(np.int32)
    codes = np.empty(CHUNK, np.uint8)
    _encode(codes, values, magnitudes, bits, bucket, gain, top, counter, k1, measure, said, tops, wire.numpy())


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    levels, said, values, codes = levels_of(bits), norms.numpy(), out.detach().numpy(), np.empty(CHUNK, np.uint8)
    _read(codes, wire.numpy(), bits, bucket, said, np.float32(weight), np.int32(levels), values, anew)


def encode_each(x: Tensor, edges: Sequence[int], bits: int, bucket: int, keys: Keys, rows: Tensor) -> None:
    values, where, written = x.detach().numpy(), np.array(edges, np.int64), rows.numpy()
    gain, top = np.float32(middle_of(bits) * GUARD), np.int32(middle_of(bits) * ONE)
    magnitudes, norms, tops = values.view(np.int32), written.view(np.float32), written.view(np.int32)
    _encode_each(values, magnitudes, where, bits, bucket, gain, top, keys, norms, tops, written)


def read_each(rows: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor) -> None:
    levels, values = np.int32(levels_of(bits)), out.detach().numpy()
    _read_each(rows.numpy(), bits, bucket, norms.numpy(), levels, values)


@kernel
def _max_norms(bits: Ints, bucket: int, out: Ints) -> None:
    for i in range(out.size):
        out[i] = top_bits(bits[i * bucket : (i + 1) * bucket])


@kernel
def round_buckets(
    x: Floats,
    magnitudes: Ints,
    lo: int,
    hi: int,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    counter: np.uint32,
    k1: np.uint32,
    measure: bool,
    norms: Floats,
    tops: Ints,
    codes: Bytes,
) -> None:
    """Round x[lo:hi] to codes; with `measure`, measure each bucket that begins there just before it is rounded."""
    inlined()
    for i in range(lo // bucket, (hi - 1) // bucket + 1):
        a, b = max(lo, i * bucket), min(hi, (i + 1) * bucket)
        if measure and a == i * bucket:
            tops[i] = top_bits(magnitudes[a : a + bucket])
        prefetch(x, a + CHUNK, b + CHUNK)
        round_codes(x, a, b, gain_of(norms[i], gain), top, top, counter, k1, codes, a - lo)


@kernel
def read_buckets(
    codes: Bytes,
    levels: np.int32,
    bucket: int,
    norms: Floats,
    weight: np.float32,
    out: Floats,
    lo: int,
    hi: int,
    anew: bool,
) -> None:
    """Write what codes say to out[lo:hi], or add it."""
    for i in range(lo // bucket, (hi - 1) // bucket + 1):
        a, b = max(lo, i * bucket), min(hi, (i + 1) * bucket)
        prefetch(out, a + CHUNK, b + CHUNK)
        read_codes(codes, a - lo, levels, unit_of(norms[i], weight, np.float32(levels)), out, a, b, anew)


@kernel
def _encode(
    codes: Bytes,
    x: Floats,
    magnitudes: Ints,
    bits: int,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    counter: np.uint32,
    k1: np.uint32,
    measure: bool,
    norms: Floats,
    tops: Ints,
    wire: Bytes,
) -> None:
    """Encode by way of a buffer of `CHUNK` codes, whatever is in it."""
    wide()
    rows = full_rows(wire, bits, x.size)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, x.size, CHUNK):
        hi = min(lo + CHUNK, x.size)
        round_buckets(x, magnitudes, lo, hi, bucket, gain, top, counter, k1, measure, norms, tops, codes)
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(
    codes: Bytes,
    wire: Bytes,
    bits: int,
    bucket: int,
    norms: Floats,
    weight: np.float32,
    levels: np.int32,
    out: Floats,
    anew: bool,
) -> None:
    """Read by way of a buffer of `CHUNK` codes, whatever is in it."""
    wide()
    rows = full_rows(wire, bits, out.size)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, out.size, CHUNK):
        hi = min(lo + CHUNK, out.size)
        unpack_blocks(rows, lo // PLANE_BLOCK, bits, blocks, (hi - lo) // PLANE_BLOCK)
        if hi - lo < CHUNK:
            unpack_tail(wire, bits, codes, out.size)
        if bits == 1:
            codes <<= np.uint8(1)  # the two points are one level above zero, and one below
        read_buckets(codes, levels, bucket, norms, weight, out, lo, hi, anew)


@kernel
def _encode_each(
    x: Floats,
    magnitudes: Ints,
    edges: Longs,
    bits: int,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    keys: Any,
    norms: Any,
    tops: Any,
    rows: Any,
) -> None:
    """Each row of `norms`, `tops` and `rows` is the same memory: first a chunk's norms, then its codes."""
    codes = np.zeros(CHUNK, np.uint8)
    for j in range(edges.size - 1):
        a, b, counter, k1 = edges[j], edges[j + 1], keys[j, 0], keys[j, 1]
        count = (b - a + bucket - 1) // bucket
        part, bare, said, measured = x[a:b], magnitudes[a:b], norms[j, :count], tops[j, :count]
        wire = rows[j, 4 * count : 4 * count + code_bytes(b - a, bits)]
        _encode(codes, part, bare, bits, bucket, gain, top, counter, k1, True, said, measured, wire)


@kernel
def _read_each(rows: Any, bits: int, bucket: int, norms: Any, levels: np.int32, out: Floats) -> None:
    """Codes stand in a row behind as many bytes as its norms take."""
    codes, begin = np.zeros(CHUNK, np.uint8), 4 * norms.shape[1]
    end = begin + code_bytes(out.size, bits)
    for j in range(rows.shape[0]):
        _read(codes, rows[j, begin:end], bits, bucket, norms[j], np.float32(1), levels, out, False)
