"""Uniform levels per bucket."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.core.rng import Key
from gossamer.kernels.layout import ONE, gains, levels_of, middle_of, units
from gossamer.kernels.reference.hashing import fixed_point, fractions
from gossamer.kernels.reference.planes import pack, put, unpack


def max_norms(x: Tensor, bucket: int) -> Tensor:
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    return _buckets(magnitude, bucket).amax(1).view(torch.float32)


def l2_norms(x: Tensor, bucket: int) -> Tensor:
    return _buckets(x, bucket).double().square().sum(1).sqrt().float()


def encode(x: Tensor, bits: int, bucket: int, norms: Tensor, key: Key, measure: bool, wire: Tensor) -> None:
    if measure:
        norms.copy_(max_norms(x, bucket))
    wire.copy_(pack(codes(x, middle_of(bits), bucket, norms, key), bits))


def codes(x: Tensor, middle: float, bucket: int, norms: Tensor, key: Key) -> Tensor:
    n, top = x.numel(), int(middle * ONE)
    fixed = fixed_point(x * gains(norms, middle).repeat_interleave(bucket)[:n], top)
    return ((fixed + top + fractions(n, key, x.device)) >> 23).to(torch.uint8)


def read(wire: Tensor, bits: int, bucket: int, norms: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    found = unpack(wire, bits, n).int()
    levels = 2 * found - 1 if bits == 1 else found - levels_of(bits)
    said = levels * units(norms, weight, levels_of(bits)).repeat_interleave(bucket)[:n]
    put(said, out, anew)


def _buckets(x: Tensor, bucket: int) -> Tensor:
    return pad(x, (0, -x.numel() % bucket)).view(-1, bucket)
