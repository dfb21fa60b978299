"""The tails of a Rice code: bits that say if a quotient is at least 2, at least 3, and so on.

They are written in one of two ways, to the same bits. Where a host moves bytes together in an instruction, those that go on lie side
by side, and each plane costs as much as it says: encoding takes a quarter less. Elsewhere, and to read them, their bits are moved
together, or apart, in every word of every plane. (To read them side by side as well was 8 % faster, for twice as much code.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gossamer.kernels.cpu.compile import Bytes, kernel
from gossamer.kernels.cpu.hints import wide
from gossamer.kernels.cpu.masks import (
    MOVES_BYTES,
    add_where,
    at_least,
    ones,
    spread,
    squeeze,
    squeeze_bytes,
    squeeze_depths,
)
from gossamer.kernels.layout import LEVEL_BLOCK, LEVEL_RECORD, LEVEL_ZEROS

Words = npt.NDArray[np.uint64]
WORDS = LEVEL_RECORD // 64
ROOM = LEVEL_RECORD + 64  # bytes of elements side by side, and of those that are written behind the last
EACH = LEVEL_BLOCK // 64  # words that share a parameter
_FEW = 64  # levels of which twice a quotient, and one, fit into a byte


@kernel
def append(flags: np.uint64, count: int, out: Words, at: int, held: np.uint64) -> tuple[int, np.uint64]:
    """Append bits to a word that is not full yet."""
    bit = np.uint64(at & 63)
    held |= flags << bit
    out[np.uint64(at >> 6)] = held
    over = (flags >> np.uint64(1)) >> (np.uint64(63) - bit)
    return at + count, over if int(bit) + count >= 64 else held


@kernel
def bits(record: Words, at: int) -> np.uint64:
    """Read 64 bits from any position."""
    word, bit = np.uint64(at >> 6), np.uint64(at & 63)
    return (record[word] >> bit) | ((record[word + np.uint64(1)] << np.uint64(1)) << (np.uint64(63) - bit))


@kernel
def write_by_words(
    codes: Bytes, rice: Bytes, levels: int, words: int, alive: Words, room: Bytes, out: Words, at: int, held: np.uint64
) -> tuple[int, np.uint64]:
    """Write the tails of the unfinished elements, and return the last word, which is not in `out` yet."""
    wide()
    k, more = 1, True
    while more:
        more, k = False, k + 1
        for block in range(rice.size):
            r = int(rice[block])
            bound, last = np.uint8(k << r), k >= 2 * levels >> r
            for w in range(block * EACH, min((block + 1) * EACH, words)):
                here = alive[w]
                if here:
                    reached = at_least(codes, 64 * w, bound)
                    at, held = append(squeeze(reached, here), ones(here), out, at, held)
                    alive[w] = np.uint64(0) if last else reached
                    more |= alive[w] != 0
    return at, held


@kernel
def read_tails(
    record: Words, most: int, rice: Bytes, levels: int, words: int, alive: Words, codes: Bytes, at: int
) -> int:
    """Add the tails to the codes of unfinished elements; returns the end, or a position beyond `most` if corrupt."""
    wide()
    k, more = 1, True
    while more and at <= most:
        more, k = False, k + 1
        for block in range(rice.size):
            r = int(rice[block])
            unit, last = np.uint8(1 << r), k >= 2 * levels >> r
            for w in range(block * EACH, min((block + 1) * EACH, words)):
                here = alive[w]
                if here:
                    reached = spread(bits(record, at), here)
                    at += ones(here)
                    add_where(codes, 64 * w, reached, unit)
                    alive[w] = np.uint64(0) if last else reached
                    more |= alive[w] != 0
    return at


@kernel
def write_side_by_side(
    codes: Bytes, rice: Bytes, levels: int, words: int, alive: Words, room: Bytes, out: Words, at: int, held: np.uint64
) -> tuple[int, np.uint64]:
    """Like `write_by_words`, for elements side by side.

    Of each quotient twice as much is kept, and one if it is not the largest, which ends without a zero.
    """
    wide()
    if levels >= _FEW:
        return write_by_words(codes, rice, levels, words, alive, room, out, at, held)
    n, k = 0, 1
    for block in range(rice.size):
        if rice[block] != LEVEL_ZEROS:
            last = np.uint8(2 * levels >> int(rice[block]))
            for w in range(block * EACH, min((block + 1) * EACH, words)):
                squeeze_depths(codes, 64 * w, rice[block], last, alive[w], room, n)
                n += ones(alive[w])
    while n:
        count, n, k = n, 0, k + 1
        for i in range(0, count, 64):
            inside = _first(count - i)
            reached = at_least(room, i, np.uint8(2 * k)) & inside
            at, held = append(reached, min(count - i, 64), out, at, held)
            onward = at_least(room, i, np.uint8(2 * k + 1)) & inside
            squeeze_bytes(room, i, onward, room, n)
            n += ones(onward)
    return at, held


@kernel
def _first(count: int) -> np.uint64:
    """A mask of `count` ones from the lowest bit on; all ones if `count` is too large."""
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - min(count, 64))


write_tails = write_side_by_side if MOVES_BYTES else write_by_words
