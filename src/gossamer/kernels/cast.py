"""Half-width floats on the wire, with the rounding error kept for the next step."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.errors import require_count, require_length, require_vector


def cast_feedback(g: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """w = round_to_nearest_even(g + residual) as bytes; residual <- (g + residual) - w, in one pass.

    Reads 8 and writes 6 bytes per element. A value beyond the range of the dtype becomes infinite and so does
    its residual: the caller checks for that before it commits a memory.
    """
    _require_half(dtype)
    require_vector("g", g)
    require_vector("residual", residual)
    require_count("residual", residual, g.numel())
    return twin("cast", "feedback", g.device)(g, residual, dtype)


def cast_accumulate(wire: Tensor, dtype: torch.dtype, out: Tensor, weight: float = 1.0) -> None:
    """out += weight * w, in place. Reads 6 and writes 4 bytes per element."""
    _require_half(dtype)
    require_vector("out", out)
    require_length(f"cast {dtype}", wire, 2 * out.numel())
    twin("cast", "accumulate", out.device)(wire, dtype, out, weight)


def _require_half(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
