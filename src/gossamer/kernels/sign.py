"""One sign bit per element and one scale per segment, in one pass over memory."""

from typing import Literal

from torch import Tensor

from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.layout import Bounds, require_count, require_length, require_vector


def sign_bytes(n: int) -> int:
    """Bytes of n sign bits: ceil(n / 8)."""
    return layout.plane_bytes(n, 1)


def sign_encode(x: Tensor, bounds: Bounds, power: Literal[1, 2], out: Tensor) -> Tensor:
    """Write the sign bits to `out`; returns mean |x| of each segment (power 1), or its root mean square (power 2).

    sign(0) is +1 and its bit is 1. Sums are float64 in one fixed order: bit-equal everywhere. An element that is not finite
    makes a scale that is not. Reads 4 and writes 1/8 bytes per element.
    """
    require_vector("x", x)
    layout.require_bounds(bounds, x.numel())
    require_length("sign", out, sign_bytes(x.numel()))
    return twin("sign", "encode", x.device)(x, bounds, power, out)


def sign_decode(wire: Tensor, bounds: Bounds, scales: Tensor, out: Tensor, weight: float | None = None) -> None:
    """out = scale * (+1 or -1); with a weight out += weight times that. A segment whose scale is not finite becomes NaN.

    Reads 1/8, with a weight 4 more, and writes 4 bytes per element.
    """
    require_vector("out", out)
    require_count("scales", scales, layout.require_bounds(bounds, out.numel()))
    require_length("sign", wire, sign_bytes(out.numel()))
    units = layout.units(scales, 1.0 if weight is None else weight, 1)
    twin("sign", "read", out.device)(wire, bounds, units, out, weight is None)
