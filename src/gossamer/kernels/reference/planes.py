"""Folds a vector into planar rows and back; spreads a table over a vector, and writes what was decoded."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.kernels.layout import PLANE_BLOCK, Bounds, lengths_on, planes


def fold(codes: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """Full blocks as (blocks, rows, block / rows) and the padded tail as (1, rows, smallest width)."""
    cut = codes.numel() // block * block
    tail = codes[cut:]
    width = -(-tail.numel() // rows)
    tail = pad(tail, (0, rows * width - tail.numel()))
    return codes[:cut].view(-1, rows, block // rows), tail.view(1, rows, width)


def unfold(full: Tensor, tail: Tensor, n: int) -> Tensor:
    """The inverse of `fold`."""
    return torch.cat([full.reshape(-1), tail.reshape(-1)])[:n]


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes as planes; each block's planes follow one another."""
    full: list[Tensor] = []
    tail: list[Tensor] = []
    below = 0
    for width in planes(bits):
        plane = (codes >> below) & ((1 << width) - 1)
        for parts, folded in zip((full, tail), fold(plane, 8 // width, PLANE_BLOCK), strict=True):
            shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device).view(1, -1, 1)
            parts.append((folded << shifts).sum(1, dtype=torch.uint8))
        below += width
    return torch.cat([torch.cat(full, 1).reshape(-1), torch.cat(tail, 1).reshape(-1)])


def unpack(wire: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack`."""
    cut = n // PLANE_BLOCK
    full, tail = wire[: cut * 64 * bits].view(cut, 64 * bits), wire[cut * 64 * bits :].view(1, -1)
    codes = torch.zeros(n, dtype=torch.uint8, device=wire.device)
    below = start = begin = 0
    for width in planes(bits):
        stop = start + 64 * width
        end = begin + -(-(n - cut * PLANE_BLOCK) * width // 8)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=wire.device).view(1, -1, 1)
        plane = unfold(full[:, None, start:stop] >> shifts, tail[:, None, begin:end] >> shifts, n)
        codes |= (plane & ((1 << width) - 1)) << below
        below, start, begin = below + width, stop, end
    return codes


def to_bytes(bits: Tensor) -> Tensor:
    """Bits, one per element (uint8), as bytes; the first bit is the lowest."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def to_bits(wire: Tensor) -> Tensor:
    """The inverse of `to_bytes`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=wire.device)
    return ((wire[:, None] >> shifts) & 1).view(-1)


def spread(table: Tensor, bounds: Bounds) -> Tensor:
    """One table entry per element, from one per segment."""
    return table.repeat_interleave(lengths_on(bounds, table.device), output_size=bounds[-1])


def put(said: Tensor, out: Tensor, anew: bool) -> None:
    """Write what was decoded to `out`, or add it; writing adds to 0.0, so that there is no -0.0."""
    torch.add(torch.zeros((), device=out.device, dtype=torch.float32) if anew else out, said, out=out)
