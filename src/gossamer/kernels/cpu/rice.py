"""Rice code of levels, one record at a time: 64 levels are compared with a number at once, which gives one word of bits."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import Bytes, kernel
from gossamer.kernels.cpu.hints import wide
from gossamer.kernels.cpu.masks import add_where, at_least, has, ones
from gossamer.kernels.cpu.tails import EACH, Words, append, bits, read_tails, write_tails
from gossamer.kernels.layout import LEVEL_BLOCK, LEVEL_ZEROS


@kernel
def fold(codes: Bytes, levels: np.uint8, size: int) -> None:
    """Map 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ...; fill up the last word with zeros."""
    wide()
    for i in range(size):
        level = np.int8(np.uint8(codes[i] - levels))
        codes[i] = np.uint8(np.int8(np.int8(level << np.int8(1)) ^ np.int8(level >> np.int8(7))))
    for i in range(size, (size + 63) // 64 * 64):
        codes[i] = np.uint8(0)


@kernel
def unfold(codes: Bytes, levels: np.uint8, size: int) -> np.uint8:
    """The inverse of `fold`; returns the largest code."""
    wide()
    top = np.uint8(0)
    for i in range(size):
        top = max(top, codes[i])
    for i in range(size):
        half, odd = np.uint8(codes[i] >> np.uint8(1)), np.uint8(codes[i] & np.uint8(1))
        codes[i] = np.uint8(np.uint8(half ^ np.uint8(-odd)) + levels)
    return top


@kernel
def parameters(codes: Bytes, bits: int, size: int, out: Bytes) -> None:
    """The Rice parameter of each block: the smallest one that gives the shortest code."""
    wide()
    for block in range(out.size):
        inside = min(LEVEL_BLOCK, size - block * LEVEL_BLOCK)
        best, chosen, quotients = 1 << 40, 0, 0
        for r in range(bits - 1, -1, -1):
            bit, count = np.uint8(1 << r), 0
            for w in range(block * LEVEL_BLOCK, block * LEVEL_BLOCK + inside, 64):
                count += ones(has(codes, w, bit))
            quotients = count + 2 * quotients
            cost = quotients + (r + 1) * inside
            if cost <= best:
                best, chosen = cost, r
        out[block] = chosen if quotients else LEVEL_ZEROS


@kernel
def code(codes: Bytes, rice: Bytes, levels: int, size: int, alive: Words, room: Bytes, out: Words) -> int:
    """Write the record of folded codes, of whole words or of less than one, and return its bits."""
    wide()
    if size < 64:
        at, held = _write_few(codes, int(rice[0]), levels, size, alive, out)
    else:
        at, held = 64 * _write_whole(codes, rice, levels, size // 64, alive, out), np.uint64(0)
    at, held = write_tails(codes, rice, levels, (size + 63) // 64, alive, room, out, at, held)
    out[np.uint64(at >> 6)] = held
    return at


@kernel
def _write_whole(codes: Bytes, rice: Bytes, levels: int, count: int, alive: Words, out: Words) -> int:
    """Write the planes in which every element has a bit, as whole words."""
    at = np.uint64(0)
    for plane in range(8):
        for block in range(rice.size):
            if plane < rice[block] and rice[block] != LEVEL_ZEROS:
                for w in range(block * EACH, min((block + 1) * EACH, count)):
                    out[at] = has(codes, 64 * w, np.uint8(1 << plane))
                    at += np.uint64(1)
    for block in range(rice.size):
        r = int(rice[block])
        for w in range(block * EACH, min((block + 1) * EACH, count)):
            alive[w] = np.uint64(0)
            if r != LEVEL_ZEROS:
                out[at] = at_least(codes, 64 * w, np.uint8(1 << r))
                if 2 * levels >> r > 1:
                    alive[w] = out[at]
                at += np.uint64(1)
    return int(at)


@kernel
def _write_few(codes: Bytes, r: int, levels: int, size: int, alive: Words, out: Words) -> tuple[int, np.uint64]:
    """Write the planes in which every element has a bit, for less than a word of elements."""
    at, held = 0, np.uint64(0)
    alive[0] = np.uint64(0)
    if r != LEVEL_ZEROS:
        for plane in range(r):
            at, held = append(has(codes, 0, np.uint8(1 << plane)), size, out, at, held)
        reached = at_least(codes, 0, np.uint8(1 << r))
        at, held = append(reached, size, out, at, held)
        if 2 * levels >> r > 1:
            alive[0] = reached
    return at, held


@kernel
def uncode(record: Words, most: int, rice: Bytes, levels: int, size: int, alive: Words, codes: Bytes) -> int:
    """Decode a record of at most `most` bits; returns the bits read, or more than `most` if the record is corrupt.

    Behind the record lies room for a plane of all its elements.
    """
    wide()
    words = (size + 63) // 64
    for i in range(64 * words):
        codes[i] = np.uint8(0)
    if size < 64:
        at = _read_few(record, int(rice[0]), levels, size, alive, codes)
    else:
        at = _read_whole(record, most, rice, levels, size // 64, alive, codes)
    return read_tails(record, most, rice, levels, words, alive, codes, at)


@kernel
def _read_whole(record: Words, most: int, rice: Bytes, levels: int, count: int, alive: Words, codes: Bytes) -> int:
    at = np.uint64(0)
    for plane in range(8):
        if 64 * int(at) > most:
            return 64 * int(at)
        for block in range(rice.size):
            if plane < rice[block] and rice[block] != LEVEL_ZEROS:
                for w in range(block * EACH, min((block + 1) * EACH, count)):
                    add_where(codes, 64 * w, record[at], np.uint8(1 << plane))
                    at += np.uint64(1)
    if 64 * int(at) > most:
        return 64 * int(at)
    for block in range(rice.size):
        r = int(rice[block])
        for w in range(block * EACH, min((block + 1) * EACH, count)):
            alive[w] = np.uint64(0)
            if r != LEVEL_ZEROS:
                add_where(codes, 64 * w, record[at], np.uint8(1 << r))
                if 2 * levels >> r > 1:
                    alive[w] = record[at]
                at += np.uint64(1)
    return 64 * int(at)


@kernel
def _read_few(record: Words, r: int, levels: int, size: int, alive: Words, codes: Bytes) -> int:
    inside, at = np.uint64((np.uint64(1) << np.uint64(size)) - np.uint64(1)), 0
    alive[0] = np.uint64(0)
    if r != LEVEL_ZEROS:
        for plane in range(r + 1):
            reached = bits(record, at) & inside
            add_where(codes, 0, reached, np.uint8(1 << plane))
            at += size
            if plane == r and 2 * levels >> r > 1:
                alive[0] = reached
    return at
