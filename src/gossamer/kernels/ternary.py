"""Base-3 coding of values rounded at random to -scale, 0 or +scale: five trits per byte."""

from __future__ import annotations

from torch import Tensor

from gossamer.core.memory_pool import uninitialised
from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.errors import require_count, require_length, require_vector
from gossamer.kernels.hashing import Key
from gossamer.kernels.layout import ternary_bytes
from gossamer.kernels.scales import Bounds

__all__ = ["ternary", "ternary_accumulate", "ternary_bytes", "ternary_decode", "ternary_encode", "ternary_levels"]


def ternary_encode(
    x: Tensor, bounds: Bounds, scales: Tensor, key: Key, offset: int = 0, out: Tensor | None = None
) -> Tensor:
    """Trits sign(x) * Bernoulli(min(|x| / scale, 1)), packed base 3; written to `out`, if there is one.

    t = (int32(x * 2**23 / scale) + (mix3(offset + i) >> 9)) >> 23, which rounds up with the fraction's probability:
    unbiased wherever |x| <= scale.
    Reads 4 and writes 1/5 bytes per element.
    """
    gains = _gains(x, bounds, scales, 1)
    wire = uninitialised(ternary_bytes(x.numel()), x.device) if out is None else out
    require_length("ternary", wire, ternary_bytes(x.numel()))
    twin("ternary", "encode", x.device)(x, bounds, gains, key, offset, wire)
    return wire


def ternary(x: Tensor, bounds: Bounds, clip: float, key: Key, scales: Tensor, out: Tensor, offset: int = 0) -> None:
    """`clipped_scales` of each segment, written to `scales`, and `ternary_encode` with them, written to `out`.

    On a CPU what fits into its caches is read once from memory. Reads 4 and writes 1/5 bytes per element.
    """
    require_vector("x", x)
    require_vector("scales", scales)
    require_count("scales", scales, layout.require_bounds(bounds, x.numel()))
    require_length("ternary", out, ternary_bytes(x.numel()))
    twin("ternary", "measure_and_encode", x.device)(x, bounds, clip, key, offset, scales, out)


def ternary_levels(x: Tensor, bounds: Bounds, scales: Tensor, key: Key, top: int = 1, offset: int = 0) -> Tensor:
    """Round as `ternary_encode` does, to int8 levels in [-top, top], unpacked: floor(x * top / scale + u).

    With top = 1 these are the trits of `ternary_encode`. Reads 4 and writes 1 byte per element.
    """
    if not 1 <= top <= 127:
        raise ValueError(f"top must be between 1 and 127, got {top}")
    gains = _gains(x, bounds, scales, top)
    return twin("ternary", "levels", x.device)(x, bounds, gains, key, top, offset)


def ternary_accumulate(wire: Tensor, bounds: Bounds, scales: Tensor, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * scale * trit, in place; a segment whose scale is not finite becomes NaN throughout.

    Reads 1/5 + 4 and writes 4 bytes per element.
    """
    _read(wire, bounds, scales, out, weight, False)


def ternary_decode(wire: Tensor, bounds: Bounds, scales: Tensor, out: Tensor) -> None:
    """out = scale * trit: to the bit what `ternary_accumulate` adds to zeros, without a pass that writes them."""
    _read(wire, bounds, scales, out, 1.0, True)


def _read(wire: Tensor, bounds: Bounds, scales: Tensor, out: Tensor, weight: float, anew: bool) -> None:
    require_vector("out", out)
    require_count("scales", scales, layout.require_bounds(bounds, out.numel()))
    require_length("ternary", wire, ternary_bytes(out.numel()))
    twin("ternary", "read", out.device)(wire, bounds, scales, weight, out, anew)


def _gains(x: Tensor, bounds: Bounds, scales: Tensor, top: int) -> Tensor:
    require_vector("x", x)
    require_vector("scales", scales)
    require_count("scales", scales, layout.require_bounds(bounds, x.numel()))
    return layout.gains(scales, top)
