"""Uniform levels per bucket."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.kernels.layout import ONE, gains, levels_of, units
from gossamer.kernels.reference.hashing import fractions
from gossamer.kernels.reference.planes import pack, unpack
from gossamer.kernels.reference.rounding import fixed_point


def max_norms(x: Tensor, bucket: int) -> Tensor:
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    return _buckets(magnitude, bucket).amax(1).view(torch.float32)


def l2_norms(x: Tensor, bucket: int) -> Tensor:
    return _buckets(x, bucket).double().square().sum(1).sqrt().float()


def encode(x: Tensor, bits: int, bucket: int, gains: Tensor, key: tuple[int, int], offset: int, wire: Tensor) -> None:
    n = x.numel()
    top = ONE // 2 if bits == 1 else levels_of(bits) * ONE
    fixed = fixed_point(x * gains.repeat_interleave(bucket)[:n], top)
    codes = (fixed + top + fractions(n, key, offset, x.device)) >> 23
    wire.copy_(pack(codes.to(torch.uint8), bits))


def measure_and_encode(
    x: Tensor, bits: int, bucket: int, top: float, key: tuple[int, int], offset: int, norms: Tensor, wire: Tensor
) -> None:
    norms.copy_(max_norms(x, bucket))
    encode(x, bits, bucket, gains(norms, top), key, offset, wire)


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    codes = unpack(wire, bits, n).int()
    levels = 2 * codes - 1 if bits == 1 else codes - levels_of(bits)
    said = levels * units(norms, weight, levels_of(bits)).repeat_interleave(bucket)[:n]
    torch.add(
        torch.zeros((), device=out.device, dtype=torch.float32) if anew else out, said, out=out
    )  # -0.0 becomes 0.0


def _buckets(x: Tensor, bucket: int) -> Tensor:
    return pad(x, (0, -x.numel() % bucket)).view(-1, bucket)
