"""Random rotations by Hadamard's matrix: works on one block at a time, which stays in L1.

A block is a matrix with rows of 32. Butterflies between rows take eight columns at once; those inside of a row are between rows
as well, once the matrix is transposed.
"""

import numpy as np
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.cpu.compile import Bytes, Floats, float_of, kernel, prefetch, wide
from gossamer.kernels.cpu.hadamard import (
    Scratch,
    add_row,
    down2,
    down4,
    down8,
    load_row,
    signed4,
    store_row,
    sum8,
    sum_squares8,
    transpose8,
    up2,
    up4,
    up8,
)
from gossamer.kernels.cpu.hashing import Start, start, word
from gossamer.kernels.cpu.nearest import read_block, round_block
from gossamer.kernels.cpu.planes import BLOCKS, CHUNK, full_rows, pack, pack_tail, unpack_blocks, unpack_tail
from gossamer.kernels.cpu.scales import top_between
from gossamer.kernels.gaussian import tables_on
from gossamer.kernels.layout import PLANE_BLOCK, ROTATED_MOST, SECOND_SIGNS, Rotation

Tables = tuple[Floats, Floats]
_WORDS = ROTATED_MOST // 32


def encode(x: Tensor, form: Rotation, key: Key, scales: Tensor, wire: Tensor) -> None:
    levels, limits = tables_on(form.bits, x.device)
    tables = levels.numpy(), limits.numpy()
    _encode(x.detach().numpy(), (form.bits, form.block), start(key), tables, scales.numpy(), wire.numpy())


def read(wire: Tensor, form: Rotation, key: Tensor, units: Tensor, out: Tensor, anew: bool) -> None:
    first, second = key.tolist()
    tables = tables_on(form.bits, out.device)[0].numpy(), units.numpy()
    _read(
        wire.numpy(), (form.bits, form.block), start((first, second & 0xFFFFFFFF)), tables, out.detach().numpy(), anew
    )


@kernel
def _encode(x: Floats, form: tuple[int, int], key: Start, tables: Tables, scales: Floats, wire: Bytes) -> None:
    """Encode with these levels, and limits between them."""
    wide()
    bits, size = form
    rows, magnitudes, tops = full_rows(wire, bits, x.size), x.view(np.int32), scales.view(np.int32)
    codes, scratch, i = np.zeros(CHUNK, np.uint8), _scratch(), 0
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, x.size, CHUNK):
        at, hi = lo, min(lo + CHUNK, x.size)
        while at < hi:
            while x.size - at < size:
                size //= 2
            prefetch(x, at + size, at + 2 * size)
            top = top_between(magnitudes, at, at + size)
            power = min(max(np.int32(255) - np.int32(top >> np.int32(23)), np.int32(1)), np.int32(253))
            _draw_signs(at // 32, size // 32, key, scratch)
            for r in range(size // 32):
                load_row(x, at + 32 * r, float_of(np.int32(power << np.int32(23))), scratch, r)
            _rotate(scratch, size)
            back = float_of(np.int32(np.int32(np.int32(254) - power) << np.int32(23)))
            scales[i] = _scale(scratch, size, bits, tables, codes, at - lo) * back
            if top >= np.int32(0x7F800000):
                tops[i] = np.int32(0x7FC00000)
            at, i = at + size, i + 1
        pack(blocks, (hi - lo) // PLANE_BLOCK, PLANE_BLOCK, bits, rows, lo // PLANE_BLOCK)
    pack_tail(codes, x.size, bits, wire)


@kernel
def _read(wire: Bytes, form: tuple[int, int], key: Start, tables: Tables, out: Floats, anew: bool) -> None:
    """Decode with these levels, and units of the blocks."""
    wide()
    bits, size = form
    rows, codes, scratch, i = full_rows(wire, bits, out.size), np.zeros(CHUNK, np.uint8), _scratch(), 0
    blocks = codes.reshape(BLOCKS, PLANE_BLOCK)
    for lo in range(0, out.size, CHUNK):
        at, hi = lo, min(lo + CHUNK, out.size)
        unpack_blocks(rows, lo // PLANE_BLOCK, bits, blocks, (hi - lo) // PLANE_BLOCK)
        if hi - lo < CHUNK:
            unpack_tail(wire, bits, codes, out.size)
        while at < hi:
            while out.size - at < size:
                size //= 2
            prefetch(out, at + size, at + 2 * size)
            _draw_signs(at // 32, size // 32, key, scratch)
            read_block(scratch, size, bits, tables[0], codes, at - lo)
            _rotate(scratch, size)
            factors = (np.float32(1.0 / size), tables[1][i])
            for r in range(size // 32):
                if anew:
                    store_row(scratch, r, factors, out, at + 32 * r)
                else:
                    add_row(scratch, r, factors, out, at + 32 * r)
            at, i = at + size, i + 1


@kernel
def _scratch() -> Scratch:
    block, transposed = np.empty(ROTATED_MOST, np.float32), np.empty(ROTATED_MOST, np.float32)
    return block, transposed, np.empty(_WORDS, np.uint32), np.empty(_WORDS, np.uint32), np.empty(32, np.float32)


@kernel
def _draw_signs(first: int, count: int, key: Start, scratch: Scratch) -> None:
    """Draw the signs of a block whose first word has this number."""
    wide()
    counter = np.uint32(key[0] + np.uint32(first))
    for j in range(count):
        scratch[2][np.uint64(j)] = word(np.uint32(counter + np.uint32(j)), key[1])
    counter = np.uint32(counter + np.uint32(SECOND_SIGNS))
    for j in range(count):
        scratch[3][np.uint64(j)] = word(np.uint32(counter + np.uint32(j)), key[1])


@kernel
def _rotate(scratch: Scratch, size: int) -> None:
    """The transform without its factor, the second signs, and the transform again."""
    rows, x, transposed = size // 32, scratch[0], scratch[1]
    if rows < 8:
        _rotate_few(scratch, size)
        return
    _levels_up(x, rows)
    _transpose(x, rows, 32, transposed)
    for r in range(0, 32, 8):
        for c in range(0, rows, 8):
            up8(transposed, r * rows + c, rows)
    for r in range(8):
        for c in range(0, rows, 8):
            signed4(scratch, rows, r, c)
    for r in range(0, 32, 8):
        for c in range(0, rows, 8):
            down8(transposed, r * rows + c, rows)
    _transpose(transposed, 32, rows, x)
    _levels_down(x, rows)


@kernel
def _levels_up(x: Floats, rows: int) -> None:
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
def _levels_down(x: Floats, rows: int) -> None:
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
def _transpose(x: Floats, rows: int, columns: int, out: Floats) -> None:
    """Write the transpose of a matrix."""
    for r in range(0, rows, 8):
        for c in range(0, columns, 8):
            transpose8(x, r * columns + c, out, c * rows + r, (columns, rows))


@kernel
def _rotate_few(scratch: Scratch, size: int) -> None:
    """`_rotate` for a block of less than eight rows."""
    x, rows = scratch[0], size // 32
    _levels_up(x, rows)
    step = 1
    while step < 32:
        _butterflies(x, size, step)
        step *= 2
    for j in range(size):
        if np.uint32(np.uint32(scratch[3][j // 32] >> np.uint32(j % 32)) & np.uint32(1)):
            x[j] = -x[j]
    while step > 1:
        step //= 2
        _butterflies(x, size, step)
    _levels_down(x, rows)


@kernel
def _butterflies(x: Floats, size: int, step: int) -> None:
    for begin in range(0, size, 2 * step):
        for j in range(begin, begin + step):
            a, b = x[j], x[j + step]
            x[j], x[j + step] = a + b, a - b


@kernel
def _scale(scratch: Scratch, size: int, bits: int, tables: Tables, codes: Bytes, to: int) -> np.float32:
    """Round the rotated block to codes; returns its scale."""
    for j in range(0, size // 8, 8):
        sum_squares8(scratch[0], j, size // 8, scratch[1])
    mean = np.float32(_sum(scratch[1], size // 8) * np.float32(1.0 / size))
    root = np.float32(np.sqrt(mean))
    for i in range(tables[1].size):
        scratch[4][i] = np.float32(tables[1][i] * root)
    round_block(scratch, size, bits, tables[0], codes, to)
    total = _sum(scratch[1], size)
    return np.float32(0) if mean == np.float32(0) else np.float32(mean / total)


@kernel
def _sum(x: Floats, size: int) -> np.float32:
    """The sum: halves onto halves, in place."""
    while size >= 64:
        size //= 8
        for j in range(0, size, 8):
            sum8(x, j, size, x)
    while size > 1:
        size //= 2
        for j in range(size):
            x[j] += x[j + size]
    return x[0]
