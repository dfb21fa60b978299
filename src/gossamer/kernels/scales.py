"""Per-segment scales: the largest magnitude, and the deviation about zero or about the mean."""

import torch
from torch import Tensor

from gossamer.kernels.backends import chosen, twin
from gossamer.kernels.layout import Bounds, require_bounds, require_vector


def absmax(x: Tensor, bounds: Bounds) -> Tensor:
    """max |x| per segment; NaN if any element is NaN, 0 for an empty segment.

    A maximum does not depend on the order, so this is bit-equal everywhere. Reads 4 bytes per element.
    """
    require_vector("x", x)
    require_bounds(bounds, x.numel())
    return twin("scales", "absmax", x.device)(x, bounds)


def divide(x: Tensor, by: int) -> Tensor:
    """Divide x by `by` in place, and return max |x| of the result, as `absmax` does. Reads and writes 4 bytes per element.

    Doubles go through torch.
    """
    require_vector("x", x, x.dtype)
    if x.dtype != torch.float32:
        x.div_(by)
        return x.abs().amax(0, keepdim=True) if x.numel() else x.new_zeros(1)
    if chosen(x.device) == "numba":  # in one pass
        return twin("scales", "divide", x.device)(x, by)
    return absmax(x.div_(by), (0, x.numel()))


def absmax_and_rms(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """max |x| and sqrt(mean(x ** 2)) per segment, in one pass of 4 bytes per element.

    Sums are float64, and their order differs between backends: the root agrees to float32 rounding, not to the bit.
    """
    require_vector("x", x)
    require_bounds(bounds, x.numel())
    return twin("scales", "absmax_and_rms", x.device)(x, bounds)


def clipped_scales(x: Tensor, bounds: Bounds, clip: float) -> Tensor:
    """min(clip * rms, max |x|) per segment; max |x| if clip is 0."""
    if clip == 0:
        return absmax(x, bounds)
    return clipped(*absmax_and_rms(x, bounds), clip)


def clipped(largest: Tensor, deviation: Tensor, clip: float) -> Tensor:
    """The largest magnitude, clipped to a number of deviations; not clipped where the deviation is 0."""
    return torch.where(deviation > 0, torch.minimum(clip * deviation, largest), largest)


def absmax_and_std(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """max |x| and sqrt(mean((x - mean) ** 2)) per segment, in one pass of 4 bytes per element.

    Sums are float64 around the segment's first element, so a constant segment gives exactly 0. The order of
    summation differs between backends: the deviation agrees to float32 rounding, not to the bit.
    """
    require_vector("x", x)
    require_bounds(bounds, x.numel())
    return twin("scales", "absmax_and_std", x.device)(x, bounds)
