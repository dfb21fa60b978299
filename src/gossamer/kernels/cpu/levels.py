"""Uniform levels of any number per bucket, in a Rice code: rounds one record at a time into a buffer in L1, and codes it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, kernel
from gossamer.kernels.cpu.hashing import start
from gossamer.kernels.cpu.hints import prefetch, wide
from gossamer.kernels.cpu.quantise import say_again, say_first
from gossamer.kernels.cpu.rice import code, fold, parameters, uncode, unfold
from gossamer.kernels.cpu.rounding import gain_of, round_codes, unit_of
from gossamer.kernels.cpu.scales import top_bits
from gossamer.kernels.cpu.tails import ROOM, WORDS
from gossamer.kernels.layout import GUARD, LEVEL_BLOCK, LEVEL_MOST, LEVEL_RECORD, LEVEL_ZEROS, ONE, Coded

_BLOCKS = LEVEL_RECORD // LEVEL_BLOCK


def encode(
    x: Tensor, levels: int, bucket: int, norms: Tensor, key: tuple[int, int], offset: int, measure: bool, wire: Tensor
) -> int:
    values, (counter, k1) = x.detach().numpy(), start(key, offset)
    said, plan = norms.numpy(), Coded(x.numel(), levels)
    gain, top = np.float32(levels * GUARD), np.int32(levels * ONE)
    tops = said.view(np.int32)
    shape = levels, plan.bits, plan.records, plan.first
    return _encode(
        values, values.view(np.int32), bucket, gain, top, counter, k1, said, tops, measure, *shape, wire.numpy()
    )


def read(wire: Tensor, levels: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> bool:
    plan, said = Coded(out.numel(), levels), norms.numpy()
    factor, shape = np.float32(weight), (levels, plan.bits, plan.records, plan.first)
    return _read(wire.numpy(), bucket, said, factor, *shape, out.detach().numpy(), anew)


@kernel
def _encode(
    x: Floats,
    magnitudes: Ints,
    bucket: int,
    gain: np.float32,
    top: np.int32,
    counter: np.uint32,
    k1: np.uint32,
    norms: Floats,
    tops: Ints,
    measure: bool,
    levels: int,
    bits: int,
    records: int,
    first: int,
    wire: Bytes,
) -> int:
    """Encode, and return the wire's length; with `measure`, compute each bucket's norm first."""
    wide()
    codes, alive = np.zeros(LEVEL_RECORD, np.uint8), np.zeros(WORDS, np.uint64)
    words, room = np.zeros(LEVEL_MOST // 8 + 2, np.uint64), np.zeros(ROOM, np.uint8)
    raw, at, factor = words.view(np.uint8), first, np.float32(0)
    for record in range(records):
        lo = min(record * LEVEL_RECORD, x.size // 64 * 64)
        hi = _end(lo, x.size)
        a = lo
        while a < hi:
            i = a // bucket
            if a == i * bucket and measure:
                tops[i] = top_bits(magnitudes[a : a + bucket])
            if a == i * bucket or a == lo:
                factor = gain_of(norms[i], gain)
            b = min(hi, (i + 1) * bucket)
            prefetch(x, a + LEVEL_RECORD, b + LEVEL_RECORD)
            round_codes(x, a, b, factor, top, top, counter, k1, codes, a - lo)
            a = b
        fold(codes, np.uint8(levels), hi - lo)
        begin = 2 * records + min(record * _BLOCKS, first - 2 * records - 1)
        rice = wire[begin : begin + (hi - lo + LEVEL_BLOCK - 1) // LEVEL_BLOCK]
        parameters(codes, bits, hi - lo, rice)
        length = (code(codes, rice, levels, hi - lo, alive, room, words) + 7) // 8
        wire[2 * record], wire[2 * record + 1] = length & 255, length >> 8
        _move(raw, 0, length, wire, at)
        at += length
    return at


@kernel
def _read(
    wire: Bytes,
    bucket: int,
    norms: Floats,
    weight: np.float32,
    levels: int,
    bits: int,
    records: int,
    first: int,
    out: Floats,
    anew: bool,
) -> bool:
    """Decode, and return True if the wire is valid; writes nothing if its length is wrong."""
    wide()
    if not _is_whole(wire, records, first):
        return False
    codes, alive = np.zeros(LEVEL_RECORD, np.uint8), np.zeros(WORDS, np.uint64)
    words = np.zeros(LEVEL_MOST // 8 + WORDS + 2, np.uint64)
    raw, at, one = words.view(np.uint8), first, np.int32(1)
    for record in range(records):
        lo = min(record * LEVEL_RECORD, out.size // 64 * 64)
        hi = _end(lo, out.size)
        begin = 2 * records + min(record * _BLOCKS, first - 2 * records - 1)
        rice = wire[begin : begin + (hi - lo + LEVEL_BLOCK - 1) // LEVEL_BLOCK]
        length = _length(wire, record)
        if not _known(rice, bits):
            return False
        _move(wire, at, length, raw, 0)
        used = uncode(words, 8 * length, rice, levels, hi - lo, alive, codes)
        if (used + 7) // 8 != length or unfold(codes, np.uint8(levels), hi - lo) > 2 * levels:
            return False
        at += length
        a = lo
        while a < hi:
            i = a // bucket
            b = min(hi, (i + 1) * bucket)
            prefetch(out, a + LEVEL_RECORD, b + LEVEL_RECORD)
            unit = unit_of(norms[i], weight, np.float32(levels))
            if anew:
                say_first(out, a, b, codes, a - lo, unit, one, np.int32(levels))
            else:
                say_again(out, a, b, codes, a - lo, unit, one, np.int32(levels))
            a = b
    return True


@kernel
def _is_whole(wire: Bytes, records: int, first: int) -> bool:
    """True if the lengths of the records add up to the wire's length."""
    total, longest = first, 0
    for record in range(records):
        length = _length(wire, record)
        total, longest = total + length, max(longest, length)
    return total == wire.size and longest <= LEVEL_MOST


@kernel
def _length(wire: Bytes, record: int) -> int:
    return int(wire[2 * record]) + 256 * int(wire[2 * record + 1])


@kernel
def _end(lo: int, n: int) -> int:
    """End of the record that begins at a position; elements beyond whole words form a record of their own."""
    whole = n // 64 * 64
    return min(lo + LEVEL_RECORD, whole) if lo < whole else n


@kernel
def _move(given: Bytes, start: int, length: int, out: Bytes, begin: int) -> None:
    wide()
    for i in range(length):
        out[np.uint64(begin + i)] = given[np.uint64(start + i)]


@kernel
def _known(rice: Bytes, bits: int) -> bool:
    known = True
    for i in range(rice.size):
        known &= rice[i] < bits or rice[i] == LEVEL_ZEROS
    return known
