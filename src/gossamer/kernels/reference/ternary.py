"""Base-3 coding.

The byte of a value v < 243 is ceil(v * 256 / 243), v read as the fraction v / 243 in fixed point. Multiplying the byte
by 3 ** i modulo 256 then shifts i trits out at the top, and times 3 >> 8 reads the next one: no division on the way
back.
"""

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.core.rng import Key
from gossamer.kernels.layout import ONE, TERNARY_BLOCK, TRITS, Bounds, units
from gossamer.kernels.layout import gains as gains_of
from gossamer.kernels.reference.hashing import fixed_point, fractions
from gossamer.kernels.reference.planes import fold, put, spread, unfold
from gossamer.kernels.scales import clipped_scales


def levels(x: Tensor, bounds: Bounds, gains: Tensor, key: Key, top: int) -> Tensor:
    random = fractions(x.numel(), key, x.device)
    return ((fixed_point(x * spread(gains, bounds), top * ONE) + random) >> 23).to(torch.int8)


def encode(x: Tensor, bounds: Bounds, scales: Tensor, clip: float | None, key: Key, wire: Tensor) -> None:
    if clip is not None:
        scales.copy_(clipped_scales(x, bounds, clip))
    trits = levels(x, bounds, gains_of(scales, 1), key, 1).int() + 1
    torch.cat([_bytes(part).view(-1) for part in fold(trits, TRITS, TERNARY_BLOCK)], out=wire)


def read(wire: Tensor, bounds: Bounds, scales: Tensor, weight: float, out: Tensor, anew: bool) -> None:
    n = out.numel()
    cut = n // TERNARY_BLOCK * (TERNARY_BLOCK // TRITS)
    full, tail = wire[:cut].view(-1, 1, TERNARY_BLOCK // TRITS), wire[cut:].view(1, 1, -1)
    trits = unfold(_trits(full), _trits(tail), n) - 1
    said = trits * spread(units(scales, weight, 1), bounds)
    put(said, out, anew)


def _bytes(trits: Tensor) -> Tensor:
    value = torch.zeros_like(trits[:, 0])
    for i in range(TRITS):
        value = value * 3 + trits[:, i]
    return ((value * 256 + 242) // 243).to(torch.uint8)


def _trits(wire: Tensor) -> Tensor:
    return (((wire.int() * _powers(wire.device)) & 255) * 3) >> 8


@lru_cache(maxsize=64)
def _powers(device: torch.device) -> Tensor:
    return torch.tensor([3**i for i in range(TRITS)], dtype=torch.int32, device=device).view(1, -1, 1)
