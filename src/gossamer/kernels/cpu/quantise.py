"""Uniform levels per bucket: rounds each block of 512 into a buffer in L1, then packs it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.core.rng import Key, Keys
from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, Longs, inlined, kernel, prefetch, wide
from gossamer.kernels.cpu.hashing import Start, gain_of, read_codes, round_codes, start, unit_of
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


class BucketRounding(NamedTuple):
    """How elements become codes: in buckets of so many, each with its norm."""

    bucket: int
    gain: np.float32  # of a bucket whose norm is 1
    top: np.int32  # half of the largest code, in fixed point
    measure: bool  # each norm just before its bucket is rounded
    norms: Floats
    tops: Ints  # the bits of the norms

    @staticmethod
    def of(middle: float, bucket: int, norms: Tensor, measure: bool) -> "BucketRounding":
        said = norms.numpy()
        gain, top = np.float32(middle * GUARD), np.int32(middle * ONE)
        return BucketRounding(bucket, gain, top, measure, said, said.view(np.int32))


class BucketUnits(NamedTuple):
    """What codes say: so many levels of their bucket's norm, times a weight."""

    bucket: int
    levels: np.int32
    weight: np.float32
    norms: Floats


def encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> None:
    values, rounded = x.detach().numpy(), BucketRounding.of(middle_of(bits), bucket, norms, measure)
    _encode(np.empty(CHUNK, np.uint8), values, values.view(np.int32), bits, rounded, start(key), wire.numpy())


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    said = BucketUnits(bucket, np.int32(levels_of(bits)), np.float32(weight), norms.numpy())
    _read(np.empty(CHUNK, np.uint8), wire.numpy(), bits, said, out.detach().numpy(), anew)


def encode_each(x: Tensor, edges: Sequence[int], bits: int, bucket: int, keys: Keys, rows: Tensor) -> None:
    values, where, written = x.detach().numpy(), np.array(edges, np.int64), rows.numpy()
    norms, tops = written.view(np.float32), written.view(np.int32)
    like = BucketRounding.of(middle_of(bits), bucket, torch.empty(0, dtype=torch.float32), True)
    _encode_each(values, values.view(np.int32), where, bits, like, keys, norms, tops, written)


def read_each(rows: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor) -> None:
    _read_each(rows.numpy(), bits, bucket, norms.numpy(), np.int32(levels_of(bits)), out.detach().numpy())


@kernel
def _max_norms(bits: Ints, bucket: int, out: Ints) -> None:
    for i in range(out.size):
        out[i] = top_bits(bits[i * bucket : (i + 1) * bucket])


@kernel
def round_buckets(
    x: Floats, magnitudes: Ints, lo: int, hi: int, rounded: BucketRounding, key: Start, codes: Bytes
) -> None:
    """Round x[lo:hi] to codes, by the buckets' norms."""
    inlined()
    bucket, top, tops = rounded.bucket, rounded.top, rounded.tops
    for i in range(lo // bucket, (hi - 1) // bucket + 1):
        a, b = max(lo, i * bucket), min(hi, (i + 1) * bucket)
        if rounded.measure and a == i * bucket:
            tops[i] = top_bits(magnitudes[a : a + bucket])
        prefetch(x, a + CHUNK, b + CHUNK)
        round_codes(x, a, b, gain_of(rounded.norms[i], rounded.gain), top, top, key, codes, a - lo)


@kernel
def read_buckets(codes: Bytes, said: BucketUnits, out: Floats, lo: int, hi: int, anew: bool) -> None:
    """Write what codes say to out[lo:hi], or add it."""
    bucket, levels = said.bucket, said.levels
    for i in range(lo // bucket, (hi - 1) // bucket + 1):
        a, b = max(lo, i * bucket), min(hi, (i + 1) * bucket)
        prefetch(out, a + CHUNK, b + CHUNK)
        unit = unit_of(said.norms[i], said.weight, np.float32(levels))
        read_codes(codes, a - lo, levels, unit, out, a, b, anew)


@kernel
def _encode(
    codes: Bytes, x: Floats, magnitudes: Ints, bits: int, rounded: BucketRounding, key: Start, wire: Bytes
) -> None:
    """Encode by way of a buffer of `CHUNK` codes, whatever is in it."""
    wide()
    rows = full_rows(wire, bits, x.size)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, x.size, CHUNK):
        hi = min(lo + CHUNK, x.size)
        round_buckets(x, magnitudes, lo, hi, rounded, key, codes)
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(codes: Bytes, wire: Bytes, bits: int, said: BucketUnits, out: Floats, anew: bool) -> None:
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
        read_buckets(codes, said, out, lo, hi, anew)


@kernel
def _encode_each(
    x: Floats,
    magnitudes: Ints,
    edges: Longs,
    bits: int,
    like: BucketRounding,
    keys: Any,
    norms: Any,
    tops: Any,
    rows: Any,
) -> None:
    """Each row of `norms`, `tops` and `rows` is the same memory: first a chunk's norms, then its codes. Chunks are rounded like
    `like`, with norms of their own.
    """
    codes = np.zeros(CHUNK, np.uint8)
    for j in range(edges.size - 1):
        a, b = edges[j], edges[j + 1]
        count = (b - a + like.bucket - 1) // like.bucket
        rounded = BucketRounding(like.bucket, like.gain, like.top, like.measure, norms[j, :count], tops[j, :count])
        wire = rows[j, 4 * count : 4 * count + code_bytes(b - a, bits)]
        _encode(codes, x[a:b], magnitudes[a:b], bits, rounded, (keys[j, 0], keys[j, 1]), wire)


@kernel
def _read_each(rows: Any, bits: int, bucket: int, norms: Any, levels: np.int32, out: Floats) -> None:
    """Codes stand in a row behind as many bytes as its norms take."""
    codes, begin = np.zeros(CHUNK, np.uint8), 4 * norms.shape[1]
    end = begin + code_bytes(out.size, bits)
    for j in range(rows.shape[0]):
        _read(codes, rows[j, begin:end], bits, BucketUnits(bucket, levels, np.float32(1), norms[j]), out, False)
