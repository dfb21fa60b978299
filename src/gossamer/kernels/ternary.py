"""Base-3 coding of values rounded at random to -scale, 0 or +scale: five trits per byte."""

from torch import Tensor

from gossamer.core.memory_pool import uninitialised
from gossamer.core.rng import Key
from gossamer.kernels import layout
from gossamer.kernels.backends import twin
from gossamer.kernels.layout import TRITS, Bounds, require_count, require_length, require_vector


def ternary_bytes(n: int) -> int:
    """Bytes of n trits: ceil(n / 5)."""
    return -(-n // TRITS)


def ternary_encode(
    x: Tensor, bounds: Bounds, scales: Tensor, key: Key, out: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Trits sign(x) * Bernoulli(min(|x| / scale, 1)), packed base 3; written to `out`, if there is one.

    t = (int32(x * 2**23 / scale) + (mix3(i) >> 9)) >> 23, which rounds up with the fraction's probability:
    unbiased wherever |x| <= scale. With `clip` the `clipped_scales` of each segment are written to `scales` first: on a CPU what
    fits into its caches is then read once from memory.
    Reads 4 and writes 1/5 bytes per element.
    """
    wire = uninitialised(ternary_bytes(x.numel()), x.device) if out is None else out
    _require(x, bounds, scales)
    require_length("ternary", wire, ternary_bytes(x.numel()))
    twin("ternary", "encode", x.device)(x, bounds, scales, clip, key, wire)
    return wire


def ternary_levels(x: Tensor, bounds: Bounds, scales: Tensor, key: Key, top: int = 1) -> Tensor:
    """Round as `ternary_encode` does, to int8 levels in [-top, top], unpacked: floor(x * top / scale + u).

    With top = 1 these are the trits of `ternary_encode`. Reads 4 and writes 1 byte per element.
    """
    if not 1 <= top <= 127:
        raise ValueError(f"top must be between 1 and 127, got {top}")
    _require(x, bounds, scales)
    return twin("ternary", "levels", x.device)(x, bounds, layout.gains(scales, top), key, top)


def ternary_decode(wire: Tensor, bounds: Bounds, scales: Tensor, out: Tensor, weight: float | None = None) -> None:
    """out = scale * trit; with a weight out += weight times that. A segment whose scale is not finite becomes NaN.

    Without a weight it is to the bit what is added to zeros, without a pass that writes them. Reads 1/5, with a weight 4 more,
    and writes 4 bytes per element.
    """
    require_vector("out", out)
    require_count("scales", scales, layout.require_bounds(bounds, out.numel()))
    require_length("ternary", wire, ternary_bytes(out.numel()))
    factor = 1.0 if weight is None else weight
    twin("ternary", "read", out.device)(wire, bounds, scales, factor, out, weight is None)


def _require(x: Tensor, bounds: Bounds, scales: Tensor) -> None:
    require_vector("x", x)
    require_vector("scales", scales)
    require_count("scales", scales, layout.require_bounds(bounds, x.numel()))
