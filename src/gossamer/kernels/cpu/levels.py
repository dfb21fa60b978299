"""Uniform levels of any number per bucket, in a Rice code: rounds one record at a time into a buffer in L1, and codes it.

Between rounding and packing a record is a list of bits, one per byte: plane after plane, each of those elements that it still
says something of.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, Longs, kernel, wide
from gossamer.kernels.cpu.hashing import Start, start
from gossamer.kernels.cpu.indices import parameter
from gossamer.kernels.cpu.quantise import BucketRounding, BucketUnits, read_buckets, round_buckets
from gossamer.kernels.layout import LEVEL_BLOCK, LEVEL_MOST, LEVEL_RECORD, LEVEL_ZEROS, Coded

Places = npt.NDArray[np.uint16]
_BLOCKS = LEVEL_RECORD // LEVEL_BLOCK


class RecordShape(NamedTuple):
    """What `layout.Coded` says of a wire."""

    levels: int
    bits: int
    records: int
    first: int


def _plan(n: int, levels: int) -> RecordShape:
    plan = Coded(n, levels)
    return RecordShape(levels, plan.bits, plan.records, plan.first)


def encode(x: Tensor, levels: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> int:
    values, rounded = x.detach().numpy(), BucketRounding.of(levels, bucket, norms, measure)
    return _encode(values, values.view(np.int32), rounded, start(key), _plan(x.numel(), levels), wire.numpy())


def read(wire: Tensor, levels: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> bool:
    said = BucketUnits(bucket, np.int32(levels), np.float32(weight), norms.numpy())
    return _read(wire.numpy(), said, _plan(out.numel(), levels), out.detach().numpy(), anew)


@kernel
def _encode(x: Floats, magnitudes: Ints, rounded: BucketRounding, key: Start, plan: RecordShape, wire: Bytes) -> int:
    """Encode, and return the wire's length."""
    levels, bits, records, at = plan
    codes, said = np.zeros(LEVEL_RECORD, np.uint8), np.zeros(8 * LEVEL_MOST + 8, np.uint8)
    for record in range(records):
        lo, hi = _ends(record, x.size)
        round_buckets(x, magnitudes, lo, hi, rounded, key, codes)
        inside, rice = codes[: hi - lo], _parameters(wire, record, plan, hi - lo)
        _fold(inside, np.uint8(levels))
        for block in range(rice.size):
            numbers = inside[block * LEVEL_BLOCK : (block + 1) * LEVEL_BLOCK]
            rice[block] = parameter(numbers, bits - 1) if np.any(numbers) else LEVEL_ZEROS
        count = _write(inside, rice, levels, bits, said)
        said[count : count + 8] = 0
        length = (count + 7) // 8
        wire[2 * record], wire[2 * record + 1] = length & 255, length >> 8
        _join(said, wire[at : at + length])
        at += length
    return at


@kernel
def _read(wire: Bytes, meaning: BucketUnits, plan: RecordShape, out: Floats, anew: bool) -> bool:
    """Decode, and return True if the wire is valid; writes nothing if its length is wrong."""
    levels, bits, records, at = plan
    if not _is_whole(wire, records, at):
        return False
    codes, places = np.zeros(LEVEL_RECORD, np.uint8), np.zeros(LEVEL_RECORD, np.uint16)
    said = np.zeros(8 * LEVEL_MOST + LEVEL_RECORD, np.uint8)  # with room for a plane that begins where the record ends
    for record in range(records):
        lo, hi = _ends(record, out.size)
        inside, rice = codes[: hi - lo], _parameters(wire, record, plan, hi - lo)
        if np.any((rice >= bits) & (rice != LEVEL_ZEROS)):
            return False
        length = _length(wire, record)
        _split(wire[at : at + length], said)
        at += length
        used = _decode(said, 8 * length, rice, levels, bits, places, inside)
        if (used + 7) // 8 != length or inside.max() > 2 * levels:
            return False
        _unfold(inside, np.uint8(levels))
        read_buckets(codes, meaning, out, lo, hi, anew)
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
def _ends(record: int, n: int) -> tuple[int, int]:
    """The elements of a record; those beyond whole words form a record of their own."""
    whole = n // 64 * 64
    lo = min(record * LEVEL_RECORD, whole)
    return lo, min(lo + LEVEL_RECORD, whole) if lo < whole else n


@kernel
def _parameters(wire: Bytes, record: int, plan: RecordShape, size: int) -> Bytes:
    """The bytes of a record's Rice parameters."""
    begin = 2 * plan.records + min(record * _BLOCKS, plan.first - 2 * plan.records - 1)
    return wire[begin : begin + (size + LEVEL_BLOCK - 1) // LEVEL_BLOCK]


@kernel
def _fold(codes: Bytes, levels: np.uint8) -> None:
    """Map 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ..."""
    wide()
    for i in range(codes.size):
        level = np.int8(np.uint8(codes[i] - levels))
        codes[i] = np.uint8(np.int8(np.int8(level << np.int8(1)) ^ np.int8(level >> np.int8(7))))


@kernel
def _unfold(codes: Bytes, levels: np.uint8) -> None:
    wide()
    for i in range(codes.size):
        half, odd = np.uint8(codes[i] >> np.uint8(1)), np.uint8(codes[i] & np.uint8(1))
        codes[i] = np.uint8(np.uint8(half ^ np.uint8(-odd)) + levels)


@kernel
def _join(said: Bytes, wire: Bytes) -> None:
    """Pack bits, one per byte, to bytes: a product with one bit in every seventh place brings eight of them together."""
    wide()
    words = said[: 8 * wire.size].view(np.uint64)
    for i in range(wire.size):
        wire[i] = np.uint8(np.uint64(words[i] * np.uint64(0x0102040810204080)) >> np.uint64(56))


@kernel
def _split(wire: Bytes, said: Bytes) -> None:
    wide()
    for i in range(wire.size):
        for k in range(8):
            said[8 * i + k] = np.uint8(np.uint8(wire[i] >> np.uint8(k)) & np.uint8(1))


@kernel
def _write(codes: Bytes, rice: Bytes, levels: int, bits: int, said: Bytes) -> int:
    """Write the bits of a record, and return their number; destroys the codes."""
    wide()
    at, counts = 0, np.zeros(rice.size, np.int64)
    for plane in range(bits - 1):
        for block in range(rice.size):
            if plane < rice[block] and rice[block] != LEVEL_ZEROS:
                a, b = block * LEVEL_BLOCK, min((block + 1) * LEVEL_BLOCK, codes.size)
                for i in range(b - a):
                    said[at + i] = np.uint8(np.uint8(codes[a + i] >> np.uint8(plane)) & np.uint8(1))
                at += b - a
    k, unfinished = 0, _begin(rice, codes.size, counts)
    while unfinished:
        k, unfinished = k + 1, 0
        for block in range(rice.size):
            left, r = codes[block * LEVEL_BLOCK :][: counts[block]], int(rice[block] & 7)
            bound = np.uint8(k << r)
            for j in range(left.size):
                said[at + j] = left[j] >= bound
            at += left.size
            counts[block] = _keep(left, said[at - left.size :]) if k < 2 * levels >> r else 0
            unfinished += counts[block]
    return at


@kernel
def _decode(said: Bytes, most: int, rice: Bytes, levels: int, bits: int, places: Places, codes: Bytes) -> int:
    """Read a record of at most `most` bits; returns the bits read, or more than `most` if the record is corrupt."""
    wide()
    codes[:] = 0
    at, counts = 0, np.zeros(rice.size, np.int64)
    for plane in range(bits - 1):
        for block in range(rice.size):
            if plane < rice[block] and rice[block] != LEVEL_ZEROS:
                a, b = block * LEVEL_BLOCK, min((block + 1) * LEVEL_BLOCK, codes.size)
                for i in range(b - a):
                    codes[a + i] |= np.uint8(said[at + i] << np.uint8(plane))
                at += b - a
        if at > most:
            return at
    for i in range(codes.size):
        places[i] = i
    k, unfinished = 0, _begin(rice, codes.size, counts)
    while unfinished and at <= most:
        k, unfinished = k + 1, 0
        for block in range(rice.size):
            left, r = places[block * LEVEL_BLOCK :][: counts[block]], int(rice[block] & 7)
            n = _keep(left, said[at:])
            for place in left[:n]:
                codes[place] += np.uint8(1 << r)
            at += left.size
            counts[block] = n if k < 2 * levels >> r else 0
            unfinished += counts[block]
    return at


@kernel
def _keep(left: Bytes | Places, flags: Bytes) -> int:
    """Move those with a flag to the front, and return their number."""
    n = np.uint64(0)
    for j in range(left.size):
        left[n] = left[j]
        n += np.uint64(flags[j])
    return int(n)


@kernel
def _begin(rice: Bytes, size: int, counts: Longs) -> int:
    """Count the elements of each block of which more is said, and return their sum."""
    for block in range(rice.size):
        if rice[block] != LEVEL_ZEROS:
            counts[block] = min(LEVEL_BLOCK, size - block * LEVEL_BLOCK)
    return counts.sum()
