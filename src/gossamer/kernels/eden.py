"""Blocks that are rotated at random and rounded to the nearest of the Gaussian's best levels, with one scale per block."""

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.layout import Rotated, Rotation, require_count, require_length, require_vector


def eden_encode(x: Tensor, form: Rotation, key: Key, scales: Tensor, out: Tensor) -> None:
    """Write the scale of each block to `scales`, and the codes of all elements, packed as planes, to `out`.

    A block is z = H D2 H D1 x, with H = the Hadamard matrix over sqrt(its size), D1 and D2 = random signs: bit j % 32 of
    mix3(j // 32) for element j of x, and of mix3(j // 32 + 2^26). z_j becomes the level c nearest to |z_j| sqrt(size) / |z|, with
    the sign of z_j; the code is the level's number, and the sign above it. scale = |z|^2 / <z, levels>: 0 for a block of zeros, NaN
    where an element is not finite. Blocks are those of `layout.Rotated`. Sums are float32 in one fixed order: bit-equal
    everywhere. Reads 4 and writes bits / 8 bytes per element.
    """
    require_vector("x", x)
    require_vector("scales", scales)
    require_count("scales", scales, _plan(x, form).blocks)
    require_length(f"eden {form.bits} bits", out, layout.plane_bytes(x.numel(), form.bits))
    twin("eden", "encode", x.device)(x, form, key, scales, out)


def eden_decode(
    wire: Tensor, form: Rotation, key: Tensor, scales: Tensor, out: Tensor, weight: float | None = None
) -> None:
    """out = scale * D1 H D2 H levels; with a weight out += weight times that. A block whose scale is not finite becomes NaN.

    The key is the two words of `eden_encode`'s, as int32. Reads bits / 8, with a weight 4 more, and writes 4 bytes per element.
    """
    require_vector("out", out)
    require_vector("key", key, torch.int32)
    require_count("key", key, 2)
    require_count("scales", scales, _plan(out, form).blocks)
    require_length(f"eden {form.bits} bits", wire, layout.plane_bytes(out.numel(), form.bits))
    units = layout.units(scales, 1.0 if weight is None else weight, 1)
    twin("eden", "read", out.device)(wire, form, key, units, out, weight is None)


def _plan(x: Tensor, form: Rotation) -> Rotated:
    if not 1 <= form.bits <= 6:
        raise ValueError(f"bits must be between 1 and 6, got {form.bits}")
    block = form.block
    if block & (block - 1) or not layout.ROTATED_LEAST <= block <= layout.ROTATED_MOST:
        raise ValueError(f"block must be a power of two from 64 to 4096, got {block}")
    if x.numel() % layout.ROTATED_LEAST or x.numel() > layout.ROTATED_LONGEST:
        raise ValueError(f"whole blocks of 64 elements, at most 2^31 in all, can be rotated, got {x.numel()}")
    return Rotated(x.numel(), block)
