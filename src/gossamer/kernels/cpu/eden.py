"""Random rotations by Hadamard's matrix: works on one block at a time, which stays in L1.

A block is a matrix with rows of 32. Butterflies between rows take eight columns at once; those inside of a row are between rows
as well, once the matrix is transposed.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Bytes, Floats, Ints, float_of, kernel, prefetch, wide
from gossamer.kernels.cpu.hadamard import (
    added32,
    down2,
    down4,
    down8,
    folded8,
    put32,
    signed4,
    squared8,
    taken32,
    turned8,
    up2,
    up4,
    up8,
)
from gossamer.kernels.cpu.hashing import start, word
from gossamer.kernels.cpu.nearest import (
    mean1,
    mean2,
    mean3,
    mean4,
    mean5,
    mean6,
    round1,
    round2,
    round3,
    round4,
    round5,
    round6,
)
from gossamer.kernels.cpu.planes import BLOCKS, CHUNK, full_rows, pack, pack_tail, unpack_blocks, unpack_tail
from gossamer.kernels.cpu.signs import Words
from gossamer.kernels.gaussian import tables_on
from gossamer.kernels.layout import PLANE_BLOCK, ROTATED_MOST, SECOND_SIGNS

Room = tuple[Floats, Floats, Words, Words]  # a block, its transpose, and the signs of both rotations
Tables = tuple[Floats, Floats]  # levels, and the limits between them
_WORDS = ROTATED_MOST // 32


def encode(x: Tensor, bits: int, block: int, key: Key, scales: Tensor, wire: Tensor) -> None:
    values, (levels, limits) = x.detach().numpy(), tables_on(bits, x.device)
    tables = levels.numpy(), limits.numpy()
    _encode(values, values.view(np.int32), bits, block, start(key), tables, scales.numpy(), wire.numpy())


def read(wire: Tensor, bits: int, block: int, key: Tensor, units: Tensor, out: Tensor, anew: bool) -> None:
    first, k1 = (np.uint32(int(k) & 0xFFFFFFFF) for k in key.tolist())
    levels, _ = tables_on(bits, out.device)
    _read(wire.numpy(), bits, block, (first, k1), levels.numpy(), units.numpy(), out.detach().numpy(), anew)


@kernel
def _encode(
    x: Floats,
    magnitudes: Ints,
    bits: int,
    block: int,
    key: tuple[np.uint32, np.uint32],
    tables: Tables,
    scales: Floats,
    wire: Bytes,
) -> None:
    wide()
    rows = full_rows(wire, bits, x.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    room, limits, tops = _room(), np.empty(tables[1].size, np.float32), scales.view(np.int32)
    i, size = 0, block
    for lo in range(0, x.size, CHUNK):
        at, hi = lo, min(lo + CHUNK, x.size)
        while at < hi:
            while x.size - at < size:
                size //= 2
            prefetch(x, at + size, at + 2 * size)
            top = _top(magnitudes, at, at + size)
            power = min(max(np.int32(255) - np.int32(top >> np.int32(23)), np.int32(1)), np.int32(253))
            _draw(at // 32, size // 32, key, room)
            _take(x, at, size, float_of(np.int32(power << np.int32(23))), room)
            _mix(room, size)
            back = float_of(np.int32(np.int32(np.int32(254) - power) << np.int32(23)))
            scales[i] = _scale(room, size, bits, tables, limits, codes, at - lo) * back
            if top >= np.int32(0x7F800000):
                tops[i] = np.int32(0x7FC00000)
            at, i = at + size, i + 1
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(
    wire: Bytes,
    bits: int,
    block: int,
    key: tuple[np.uint32, np.uint32],
    levels: Floats,
    units: Floats,
    out: Floats,
    anew: bool,
) -> None:
    wide()
    rows = full_rows(wire, bits, out.size)
    codes = np.zeros(CHUNK, np.uint8)
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    room = _room()
    i, size = 0, block
    for lo in range(0, out.size, CHUNK):
        at, hi = lo, min(lo + CHUNK, out.size)
        unpack_blocks(rows, lo // PLANE_BLOCK, bits, blocks, (hi - lo) // PLANE_BLOCK)
        if hi - lo < CHUNK:
            unpack_tail(wire, bits, codes, out.size)
        while at < hi:
            while out.size - at < size:
                size //= 2
            prefetch(out, at + size, at + 2 * size)
            _draw(at // 32, size // 32, key, room)
            _mean(codes, at - lo, size, bits, levels, room)
            _mix(room, size)
            _give(room, size, units[i], out, at, anew)
            at, i = at + size, i + 1


@kernel
def _room() -> Room:
    return (
        np.empty(ROTATED_MOST, np.float32),
        np.empty(ROTATED_MOST, np.float32),
        np.empty(_WORDS, np.uint32),
        np.empty(_WORDS, np.uint32),
    )


@kernel
def _top(bits: Ints, a: int, b: int) -> np.int32:
    """Like `scales.top_bits`, of a range."""
    wide()
    top = np.int32(0)
    for j in range(b - a):
        magnitude = np.int32(bits[np.uint64(a + j)] & np.int32(0x7FFFFFFF))
        if magnitude > top:
            top = magnitude
    return top


@kernel
def _draw(first: int, count: int, key: tuple[np.uint32, np.uint32], room: Room) -> None:
    """Draw the signs of a block whose first word has this number."""
    wide()
    counter = np.uint32(key[0] + np.uint32(first))
    for j in range(count):
        room[2][np.uint64(j)] = word(np.uint32(counter + np.uint32(j)), key[1])
    counter = np.uint32(counter + np.uint32(SECOND_SIGNS))
    for j in range(count):
        room[3][np.uint64(j)] = word(np.uint32(counter + np.uint32(j)), key[1])


@kernel
def _take(x: Floats, at: int, size: int, factor: np.float32, room: Room) -> None:
    for r in range(size // 32):
        taken32(x, at + 32 * r, factor, room[2][np.uint64(r)], room[0], 32 * r)


@kernel
def _give(room: Room, size: int, unit: np.float32, out: Floats, at: int, anew: bool) -> None:
    factors = (np.float32(1.0 / size), unit)
    for r in range(size // 32):
        if anew:
            put32(room[0], 32 * r, factors, room[2][np.uint64(r)], out, at + 32 * r)
        else:
            added32(room[0], 32 * r, factors, room[2][np.uint64(r)], out, at + 32 * r)


@kernel
def _mix(room: Room, size: int) -> None:
    """The transform without its factor, the second signs, and the transform again."""
    rows, x, turned = size // 32, room[0], room[1]
    if rows < 8:
        _mix_few(room, size)
        return
    _climb(x, rows)
    _turn(x, rows, 32, turned)
    for r in range(0, 32, 8):
        for c in range(0, rows, 8):
            up8(turned, r * rows + c, rows)
    for r in range(8):
        for c in range(0, rows, 8):
            signed4(turned, r * rows + c, 8 * rows, room[3], c, r)
    for r in range(0, 32, 8):
        for c in range(0, rows, 8):
            down8(turned, r * rows + c, rows)
    _turn(turned, 32, rows, x)
    _fall(x, rows)


@kernel
def _climb(x: Floats, rows: int) -> None:
    """Butterflies between rows, neighbours first."""
    near = 1
    while near < rows:
        radix = min(rows // near, 8)
        for r in range(rows // radix):
            at = (r // near * near * radix + r % near) * 32
            for c in range(at, at + 32, 8):
                if radix == 8:
                    up8(x, c, near * 32)
                elif radix == 4:
                    up4(x, c, near * 32)
                else:
                    up2(x, c, near * 32)
        near *= radix


@kernel
def _fall(x: Floats, rows: int) -> None:
    """Butterflies between rows, neighbours last."""
    near = rows
    while near > 1:
        radix = min(near, 8)
        near //= radix
        for r in range(rows // radix):
            at = (r // near * near * radix + r % near) * 32
            for c in range(at, at + 32, 8):
                if radix == 8:
                    down8(x, c, near * 32)
                elif radix == 4:
                    down4(x, c, near * 32)
                else:
                    down2(x, c, near * 32)


@kernel
def _turn(x: Floats, rows: int, columns: int, out: Floats) -> None:
    """Write the transpose of a matrix."""
    for r in range(0, rows, 8):
        for c in range(0, columns, 8):
            turned8(x, r * columns + c, columns, out, c * rows + r, rows)


@kernel
def _mix_few(room: Room, size: int) -> None:
    """`_mix` of a block of less than eight rows."""
    x, rows = room[0], size // 32
    _climb(x, rows)
    step = 1
    while step < 32:
        _butterflies(x, size, step)
        step *= 2
    for j in range(size):
        if np.uint32(np.uint32(room[3][j // 32] >> np.uint32(j % 32)) & np.uint32(1)):
            x[j] = -x[j]
    while step > 1:
        step //= 2
        _butterflies(x, size, step)
    _fall(x, rows)


@kernel
def _butterflies(x: Floats, size: int, step: int) -> None:
    for begin in range(0, size, 2 * step):
        for j in range(begin, begin + step):
            a, b = x[j], x[j + step]
            x[j], x[j + step] = a + b, a - b


@kernel
def _scale(room: Room, size: int, bits: int, tables: Tables, limits: Floats, codes: Bytes, to: int) -> np.float32:
    """Round the rotated block to codes; returns its scale."""
    mean = np.float32(_squares(room, size) * np.float32(1.0 / size))
    root = np.float32(np.sqrt(mean))
    for i in range(limits.size):
        limits[i] = np.float32(tables[1][i] * root)
    _round(room, size, bits, tables[0], limits, codes, to)
    _fold(room[1], size, size)
    return np.float32(0) if mean == np.float32(0) else np.float32(mean / room[1][0])


@kernel
def _squares(room: Room, size: int) -> np.float32:
    """The sum of the block's squares: halves onto halves."""
    stride = size // 8
    for j in range(0, stride, 8):
        squared8(room[0], j, stride, room[1], j)
    _fold(room[1], stride, stride)
    return room[1][0]


@kernel
def _fold(x: Floats, size: int, left: int) -> None:
    """Add halves onto halves, until the sum is in the first element."""
    while left >= 64:
        left //= 8
        for j in range(0, left, 8):
            folded8(x, j, left, x, j)
    while left > 1:
        left //= 2
        for j in range(left):
            x[j] += x[j + left]


@kernel
def _round(room: Room, size: int, bits: int, levels: Floats, limits: Floats, codes: Bytes, to: int) -> None:
    """The codes of the rotated block, and the products of its elements with their levels in the transpose's place."""
    z, products = room[0], room[1]
    for j in range(0, size, 16):
        if bits == 1:
            round1(z, j, limits, levels, codes, to + j, products)
        elif bits == 2:
            round2(z, j, limits, levels, codes, to + j, products)
        elif bits == 3:
            round3(z, j, limits, levels, codes, to + j, products)
        elif bits == 4:
            round4(z, j, limits, levels, codes, to + j, products)
        elif bits == 5:
            round5(z, j, limits, levels, codes, to + j, products)
        else:
            round6(z, j, limits, levels, codes, to + j, products)


@kernel
def _mean(codes: Bytes, at: int, size: int, bits: int, levels: Floats, room: Room) -> None:
    """The levels of a block's codes."""
    for j in range(0, size, 16):
        if bits == 1:
            mean1(codes, at + j, levels, room[0], j)
        elif bits == 2:
            mean2(codes, at + j, levels, room[0], j)
        elif bits == 3:
            mean3(codes, at + j, levels, room[0], j)
        elif bits == 4:
            mean4(codes, at + j, levels, room[0], j)
        elif bits == 5:
            mean5(codes, at + j, levels, room[0], j)
        else:
            mean6(codes, at + j, levels, room[0], j)
