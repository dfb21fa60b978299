"""Uniform levels per bucket: rounds each block of 512 into a buffer in L1, then packs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, Longs, inlined, kernel, prefetch, wide
from gossamer.kernels.cpu.hashing import gain_of, read_codes, round_codes, start, unit_of
from gossamer.kernels.cpu.planes import BLOCKS, CHUNK, full_rows, pack, pack_tail, unpack_blocks, unpack_tail
from gossamer.kernels.cpu.scales import top_bits
from gossamer.kernels.layout import GUARD, ONE, PLANE_BLOCK, levels_of, middle_of, plane_bytes


def max_norms(x: Tensor, bucket: int) -> Tensor:
    out = torch.empty(-(-x.numel() // bucket), dtype=torch.float32)
    _max_norms(x.detach().numpy().view(np.int32), bucket, out.numpy().view(np.int32))
    return out


def encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> None:
    values, said, (counter, k1) = x.detach().numpy(), norms.numpy(), start(key)
    gain, top = np.float32(middle_of(bits) * GUARD), np.int32(middle_of(bits) * ONE)
    magnitudes, tops = values.view(np.int32), said.view(np.int32)
    _encode(values, magnitudes, bits, bucket, gain, top, counter, k1, measure, said, tops, wire.numpy())


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    levels, said, values = levels_of(bits), norms.numpy(), out.detach().numpy()
    _read(wire.numpy(), bits, bucket, said, np.float32(weight), np.int32(levels), values, anew)


def encode_each(
    chunks: Sequence[Tensor], bits: int, bucket: int, keys: Sequence[Key], norms: Tensor, wires: Tensor
) -> None:
    values, said, words = _joined(chunks).detach().numpy(), norms.numpy(), np.array(keys, np.int64)
    gain, top = np.float32(middle_of(bits) * GUARD), np.int32(middle_of(bits) * ONE)
    sizes = [chunk.numel() for chunk in chunks]
    where, lengths = np.cumsum([0, *sizes]), np.array([plane_bytes(n, bits) for n in sizes], np.int64)
    _encode_each(
        values,
        where,
        bits,
        bucket,
        gain,
        top,
        words.astype(np.uint32),
        said,
        said.view(np.int32),
        wires.numpy(),
        lengths,
    )


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    """Chunks as one tensor: a view where they lie one after the other, as those of a bucket do, and else a copy."""
    ends = [chunk.data_ptr() + chunk.numel() * chunk.element_size() for chunk in chunks]
    if all(end == chunk.data_ptr() for end, chunk in zip(ends, chunks[1:])):
        return chunks[0].as_strided((sum(chunk.numel() for chunk in chunks),), (1,))
    return torch.cat([*chunks])


def read_each(wires: Tensor, bits: int, bucket: int, norms: Tensor, out: Tensor) -> None:
    _read_each(wires.numpy(), bits, bucket, norms.numpy(), np.int32(levels_of(bits)), out.detach().numpy())


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
    wide()
    rows = full_rows(wire, bits, x.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, x.size, CHUNK):
        hi = min(lo + CHUNK, x.size)
        round_buckets(x, magnitudes, lo, hi, bucket, gain, top, counter, k1, measure, norms, tops, codes)
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(
    wire: Bytes,
    bits: int,
    bucket: int,
    norms: Floats,
    weight: np.float32,
    levels: np.int32,
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
        if bits == 1:
            codes <<= np.uint8(1)  # the two points are one level above zero, and one below
        read_buckets(codes, levels, bucket, norms, weight, out, lo, hi, anew)


@kernel
def _encode_each(
    x: Floats,
    bounds: Longs,
    bits: int,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    keys: Any,
    norms: Any,
    tops: Any,
    wires: Any,
    lengths: Longs,
) -> None:
    for j in range(lengths.size):
        part, said = x[bounds[j] : bounds[j + 1]], norms[j]
        counter, k1 = keys[j, 0], keys[j, 1]
        wire = wires[j, : lengths[j]]
        _encode(part, part.view(np.int32), bits, bucket, gain, top, counter, k1, True, said, tops[j], wire)


@kernel
def _read_each(wires: Any, bits: int, bucket: int, norms: Any, levels: np.int32, out: Floats) -> None:
    for j in range(wires.shape[0]):
        _read(wires[j], bits, bucket, norms[j], np.float32(1), levels, out, False)
