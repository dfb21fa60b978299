"""Packing a few blocks of codes into planes, and back."""

from __future__ import annotations

import numpy as np

from gossamer.kernels.cpu.compile import Blocks, Bytes, Rows, kernel
from gossamer.kernels.cpu.hints import wide
from gossamer.kernels.layout import PLANE_BLOCK

CHUNK = 4 * PLANE_BLOCK


@kernel
def pack_chunk(codes: Bytes, bits: int, n: int, wire: Bytes) -> None:
    """Writes the first n of up to CHUNK codes; what follows them in the buffer becomes zero."""
    full = n // PLANE_BLOCK
    cut, each = full * PLANE_BLOCK, 64 * bits
    if bits & (bits - 1) == 0:
        rows = 8 // bits
        length = PLANE_BLOCK // rows
        _pack_plane(codes[:cut].reshape(full, rows, length), bits, 0, wire[: full * each].reshape(full, length))
    else:
        for b in range(full):
            _pack_planes(codes[b * PLANE_BLOCK :], bits, PLANE_BLOCK, wire[b * each :])
    if cut < n:
        codes[n:] = 0
        _pack_planes(codes[cut:], bits, n - cut, wire[full * each :])


@kernel
def _pack_planes(codes: Bytes, bits: int, n: int, wire: Bytes) -> None:
    below, at = 0, 0
    for step in range(4):
        width = 8 >> step
        if bits & width:
            rows = 8 // width
            length = -(-n // rows)
            block = codes[: rows * length].reshape(1, rows, length)
            _pack_plane(block, width, below, wire[at : at + length].reshape(1, length))
            below += width
            at += length


@kernel
def _pack_plane(codes: Blocks, width: int, below: int, wire: Rows) -> None:
    wide()
    mask, down = np.uint8((1 << width) - 1), np.uint8(below)
    for b in range(codes.shape[0]):
        for j in range(codes.shape[2]):
            wire[b, j] = np.uint8(np.uint8(codes[b, 0, j] >> down) & mask)
        for i in range(1, codes.shape[1]):
            up = np.uint8(i * width)
            for j in range(codes.shape[2]):
                wire[b, j] |= np.uint8(np.uint8(np.uint8(codes[b, i, j] >> down) & mask) << up)


@kernel
def unpack_chunk(wire: Bytes, bits: int, n: int, codes: Bytes) -> None:
    """Reads n codes; entries beyond them are overwritten with padding."""
    full = n // PLANE_BLOCK
    cut, each = full * PLANE_BLOCK, 64 * bits
    if bits & (bits - 1) == 0:
        rows = 8 // bits
        length = PLANE_BLOCK // rows
        _unpack_plane(wire[: full * each].reshape(full, length), bits, 0, codes[:cut].reshape(full, rows, length))
    else:
        for b in range(full):
            _unpack_planes(wire[b * each :], bits, PLANE_BLOCK, codes[b * PLANE_BLOCK :])
    if cut < n:
        _unpack_planes(wire[full * each :], bits, n - cut, codes[cut:])


@kernel
def _unpack_planes(wire: Bytes, bits: int, n: int, codes: Bytes) -> None:
    below, at = 0, 0
    for step in range(4):
        width = 8 >> step
        if bits & width:
            rows = 8 // width
            length = -(-n // rows)
            block = codes[: rows * length].reshape(1, rows, length)
            _unpack_plane(wire[at : at + length].reshape(1, length), width, below, block)
            below += width
            at += length


@kernel
def _unpack_plane(wire: Rows, width: int, below: int, codes: Blocks) -> None:
    wide()
    mask, up = np.uint8((1 << width) - 1), np.uint8(below)
    keep = np.uint8((1 << below) - 1)
    for b in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            down = np.uint8(i * width)
            for j in range(codes.shape[2]):
                part = np.uint8(np.uint8(np.uint8(wire[b, j] >> down) & mask) << up)
                codes[b, i, j] = np.uint8(np.uint8(codes[b, i, j] & keep) | part)
