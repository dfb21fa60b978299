"""Packs a few blocks of codes into planes, and back."""

from collections.abc import Callable

import numpy as np

from gossamer.kernels.cpu.compile import Bytes, Rows, kernel, variant, wide
from gossamer.kernels.layout import PLANE_BLOCK

Move = Callable[[Rows, int, Rows, int, int, int], None]
Read = Callable[[Rows, int, Rows, int, int, int, np.uint8], None]
BLOCKS = 8
CHUNK = BLOCKS * PLANE_BLOCK


@kernel
def full_rows(wire: Bytes, bits: int, n: int) -> Rows:
    """The bytes of the full blocks, one block per row."""
    full = n // PLANE_BLOCK
    return wire[: full * 64 * bits].reshape(full, 64 * bits)


@kernel
def code_bytes(n: int, bits: int) -> int:
    """Like `layout.plane_bytes`."""
    full, tail = n // PLANE_BLOCK, n % PLANE_BLOCK
    length = full * 64 * bits
    for width in (8, 4, 2, 1):
        if bits & width:
            length += (tail * width + 7) // 8
    return length


def _packer(width: int) -> Move:
    """Compile a plane writer for one width: bytes are shifted by constants only, 64-bit lanes by variables."""
    rows, mask = 8 // width, (1 << width) - 1

    def pack(codes: Rows, b: int, wire: Rows, row: int, at: int, length: int) -> None:
        wide()
        for j in range(length):
            byte = np.uint8(0)
            for i in range(rows):
                part = np.uint8(codes[b, np.uint64(j + i * length)] & np.uint8(mask))
                byte |= np.uint8(part << np.uint8(i * width))
            wire[row, np.uint64(at + j)] = byte

    return variant(pack, width)


def _unpacker(width: int, known: int = 0) -> Read:
    """Compile a plane reader for one width: it shifts each code up and inserts the plane's bits below.

    `keep` is 0 for the first plane of a block, which forgets the block before it, and 255 for the others. Of full blocks
    the length is known: loops of a length that the compiler knows take half the time.
    """
    rows, mask = 8 // width, (1 << width) - 1

    def unpack(codes: Rows, b: int, wire: Rows, row: int, at: int, size: int, keep: np.uint8) -> None:
        wide()
        length = known if known else size
        for i in range(rows):
            for j in range(length):
                byte = wire[row, np.uint64(at + j)]
                part = np.uint8(np.uint8(byte >> np.uint8(i * width)) & np.uint8(mask))
                old = np.uint8(codes[b, np.uint64(j + i * length)] & keep)
                codes[b, np.uint64(j + i * length)] = np.uint8(np.uint8(old << np.uint8(width)) | part)

    return variant(unpack, width, known)


_pack8, _pack4, _pack2, _pack1 = (_packer(width) for width in (8, 4, 2, 1))
_unpack8, _unpack4, _unpack2, _unpack1 = (_unpacker(width) for width in (8, 4, 2, 1))
_block8, _block4, _block2, _block1 = (_unpacker(width, 64 * width) for width in (8, 4, 2, 1))


@kernel
def _shift(codes: Rows, b: int, width: int) -> None:
    for j in range(codes.shape[1]):
        codes[b, j] = np.uint8(codes[b, j] >> np.uint8(width))


@kernel
def pack(codes: Rows, count: int, size: int, bits: int, wire: Rows, first: int) -> None:
    """Writes `count` blocks of `size` codes as planes, widest first and with the lowest bits; destroys the codes."""
    for b in range(count):
        at = 0
        if bits & 8:
            _pack8(codes, b, wire, first + b, at, size)
        if bits & 4:
            _pack4(codes, b, wire, first + b, at, (size + 1) // 2)
            at += (size + 1) // 2
            if bits & 3:
                _shift(codes, b, 4)
        if bits & 2:
            _pack2(codes, b, wire, first + b, at, (size + 3) // 4)
            at += (size + 3) // 4
            if bits & 1:
                _shift(codes, b, 2)
        if bits & 1:
            _pack1(codes, b, wire, first + b, at, (size + 7) // 8)


@kernel
def _unpack(wire: Rows, bits: int, codes: Rows, size: int) -> None:
    """Reads a block of `size` codes, the highest bits first; padding is written behind them."""
    halves, quarters, eighths = (size + 1) // 2, (size + 3) // 4, (size + 7) // 8
    none, all_bits = np.uint8(0), np.uint8(255)
    at = (halves if bits & 4 else 0) + (quarters if bits & 2 else 0)
    if bits & 1:
        _unpack1(codes, 0, wire, 0, at, eighths, none)
    if bits & 2:
        _unpack2(codes, 0, wire, 0, at - quarters, quarters, all_bits if bits & 1 else none)
    if bits & 4:
        _unpack4(codes, 0, wire, 0, 0, halves, all_bits if bits & 3 else none)
    if bits & 8:
        _unpack8(codes, 0, wire, 0, 0, size, none)


@kernel
def unpack_blocks(wire: Rows, first: int, bits: int, codes: Rows, count: int) -> None:
    """Reads `count` full blocks, the highest bits first."""
    none, all_bits = np.uint8(0), np.uint8(255)
    for b in range(count):
        at = (256 if bits & 4 else 0) + (128 if bits & 2 else 0)
        if bits & 1:
            _block1(codes, b, wire, first + b, at, 64, none)
        if bits & 2:
            at -= 128
            _block2(codes, b, wire, first + b, at, 128, all_bits if bits & 1 else none)
        if bits & 4:
            _block4(codes, b, wire, first + b, 0, 256, all_bits if bits & 3 else none)
        if bits & 8:
            _block8(codes, b, wire, first + b, 0, 512, none)


@kernel
def pack_tail(codes: Bytes, n: int, bits: int, wire: Bytes) -> None:
    """Writes the last block of a vector of n codes, if it is not full; destroys what follows it in the buffer."""
    size = n % PLANE_BLOCK
    if size:
        begin = n % CHUNK - size
        codes[begin + size :] = 0
        block = codes[begin : begin + PLANE_BLOCK].reshape(1, PLANE_BLOCK)
        start = (n - size) // 8 * bits
        pack(block, 1, size, bits, wire[start:].reshape(1, wire.size - start), 0)


@kernel
def unpack_tail(wire: Bytes, bits: int, codes: Bytes, n: int) -> None:
    """Reads the last block of a vector of n codes, if it is not full, to where its chunk has it."""
    size = n % PLANE_BLOCK
    if size:
        begin = n % CHUNK - size
        block = codes[begin : begin + PLANE_BLOCK].reshape(1, PLANE_BLOCK)
        start = (n - size) // 8 * bits
        _unpack(wire[start:].reshape(1, wire.size - start), bits, block, size)
