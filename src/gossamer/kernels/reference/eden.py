"""Random rotations by Hadamard's matrix, and the nearest of the Gaussian's levels."""

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.gaussian import tables_on
from gossamer.kernels.layout import SECOND_SIGNS, Rotated, Rotation
from gossamer.kernels.reference.hashing import Words, mix3
from gossamer.kernels.reference.planes import pack, put, unpack

_ROW = 32  # signs of one word; the butterflies between rows come first, then those inside of a row


def encode(x: Tensor, form: Rotation, key: Key, scales: Tensor, wire: Tensor) -> None:
    codes, at = torch.empty(x.numel(), dtype=torch.uint8, device=x.device), 0
    for begin, count, size in Rotated(x.numel(), form.block).stretches:
        rows = x[begin : begin + count * size].view(count, size)
        signs = _signs(begin, count, size, key, x.device)
        scales[at : at + count], codes[begin : begin + count * size] = _rounded(rows, signs, form.bits)
        at += count
    wire.copy_(pack(codes, form.bits))


def read(wire: Tensor, form: Rotation, key: Tensor, units: Tensor, out: Tensor, anew: bool) -> None:
    codes, at = unpack(wire, form.bits, out.numel()).long(), 0
    (levels, _), words = tables_on(form.bits, out.device), key.long()
    table = torch.cat([levels, -levels])
    for begin, count, size in Rotated(out.numel(), form.block).stretches:
        first, second = _signs(begin, count, size, (words[0], words[1]), out.device)
        rows = table[codes[begin : begin + count * size]].view(count, size)
        said = _rotated(rows, second) * first * (1 / size) * units[at : at + count, None]
        put(said.view(-1), out[begin : begin + count * size], anew)
        at += count


def _rounded(x: Tensor, signs: tuple[Tensor, Tensor], bits: int) -> tuple[Tensor, Tensor]:
    """The scale of each row of x, and the codes of its elements."""
    top = (x.view(torch.int32) & 0x7FFFFFFF).amax(1)
    power = (255 - (top >> 23)).clamp(1, 253)  # of two: its product with the largest is below four, or it is 2^126
    factor, back = (power << 23).view(torch.float32), ((254 - power) << 23).view(torch.float32)
    z = _rotated(x * factor[:, None] * signs[0], signs[1])
    mean = _sum(z * z) * (1 / x.shape[1])
    levels, limits = tables_on(bits, x.device)
    magnitude, root = z.abs(), mean.double().sqrt().float()
    index = torch.zeros_like(z, dtype=torch.int64)
    for limit in limits:
        index += magnitude > (limit * root)[:, None]
    scales = (mean.double() / _sum(magnitude * levels[index]).double()).float() * back
    scales = scales.masked_fill(mean == 0, 0.0).masked_fill(top >= 0x7F800000, torch.nan)
    return scales, (index | (z < 0).long() << (bits - 1)).to(torch.uint8).view(-1)


def _signs(begin: int, count: int, size: int, key: Words, device: torch.device) -> tuple[Tensor, Tensor]:
    """The signs of both rotations, as +1 and -1."""
    words = torch.arange(begin // _ROW, (begin + count * size) // _ROW, device=device)
    shifts = torch.arange(_ROW, device=device)
    drawn = [mix3(words + first, key)[:, None] >> shifts & 1 for first in (0, SECOND_SIGNS)]
    first, second = ((1 - 2 * bit).float().view(count, size) for bit in drawn)
    return first, second


def _rotated(x: Tensor, signs: Tensor) -> Tensor:
    """The transform without its factor, signs, and the transform again; additions in one order for all backends."""
    steps = [*(_ROW << k for k in range(x.shape[1].bit_length() - 6)), 1, 2, 4, 8, 16]
    for step in steps:
        x = _butterflies(x, step)
    x = x * signs
    for step in reversed(steps):
        x = _butterflies(x, step)
    return x


def _butterflies(x: Tensor, step: int) -> Tensor:
    """The sums and the differences of elements that are `step` apart."""
    a, b = x.view(x.shape[0], -1, 2, step).unbind(2)
    return torch.stack([a + b, a - b], 2).view(x.shape)


def _sum(x: Tensor) -> Tensor:
    """The sum of each row: halves onto halves."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]
