"""Packing a few blocks of codes into planes, and back."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import Bytes, Rows, kernel
from gossamer.kernels.cpu.hints import wide
from gossamer.kernels.layout import PLANE_BLOCK

BLOCKS = 8
CHUNK = BLOCKS * PLANE_BLOCK


@kernel
def full_rows(wire: Bytes, bits: int, n: int) -> Rows:
    """The bytes of the full blocks, one block per row."""
    full = n // PLANE_BLOCK
    return wire[: full * 64 * bits].reshape(full, 64 * bits)


@kernel
def pack(codes: Rows, count: int, size: int, bits: int, wire: Rows, first: int) -> None:
    """Writes `count` blocks of `size` codes as planes, widest plane first."""
    below, at = 0, 0
    for step in range(4):
        width = 8 >> step
        if bits & width:
            length = -(-size * width // 8)
            for b in range(count):
                _pack_plane(codes, b, width, below, wire, first + b, at, length)
            below += width
            at += length


@kernel
def unpack(wire: Rows, first: int, bits: int, codes: Rows, count: int, size: int) -> None:
    """Reads `count` blocks of `size` codes; padding is written behind them."""
    below, at = 0, 0
    for step in range(4):
        width = 8 >> step
        if bits & width:
            length = -(-size * width // 8)
            for b in range(count):
                _unpack_plane(wire, first + b, at, length, width, below, codes, b)
            below += width
            at += length


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
        unpack(wire[start:].reshape(1, wire.size - start), 0, bits, block, 1, size)


# Indices are unsigned so that no code for counting from the end is made, and shift amounts are masked so that the
# compiler sees that a byte's width is enough: without either, these loops run on one element or on 64-bit lanes.


@kernel
def _pack_plane(codes: Rows, b: int, width: int, below: int, wire: Rows, row: int, at: int, length: int) -> None:
    wide()
    mask, down = np.uint8((1 << width) - 1), np.uint8(below)
    for j in range(length):
        part = np.uint8(codes[b, j] >> np.uint8(down & np.uint8(7)))
        wire[row, np.uint64(at + j)] = np.uint8(part & mask)
    for i in range(1, 8 // width):
        up, begin = np.uint8(i * width), i * length
        for j in range(length):
            part = np.uint8(codes[b, np.uint64(begin + j)] >> np.uint8(down & np.uint8(7)))
            shifted = np.uint8(np.uint8(part & mask) << np.uint8(up & np.uint8(7)))
            wire[row, np.uint64(at + j)] = np.uint8(wire[row, np.uint64(at + j)] | shifted)


@kernel
def _unpack_plane(wire: Rows, row: int, at: int, length: int, width: int, below: int, codes: Rows, b: int) -> None:
    wide()
    mask, up, keep = np.uint8((1 << width) - 1), np.uint8(below), np.uint8((1 << below) - 1)
    for i in range(8 // width):
        down, begin = np.uint8(i * width), i * length
        for j in range(length):
            part = np.uint8(wire[row, np.uint64(at + j)] >> np.uint8(down & np.uint8(7)))
            shifted = np.uint8(np.uint8(part & mask) << np.uint8(up & np.uint8(7)))
            old = np.uint8(codes[b, np.uint64(begin + j)] & keep)
            codes[b, np.uint64(begin + j)] = np.uint8(old | shifted)
