"""Half-width floats with their rounding error."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 16  # keeps the temporaries of one chunk in cache


def feedback(g: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    wire = torch.empty(g.numel(), dtype=dtype, device=g.device)
    for a in range(0, g.numel(), _CHUNK):
        kept, word = residual[a : a + _CHUNK], wire[a : a + _CHUNK]
        kept += g[a : a + _CHUNK]
        word.copy_(kept)
        # vectorised and scalar conversions of a NaN differ in their bits
        word.masked_fill_(kept.isnan(), torch.nan)
        kept -= word
    return wire.view(torch.uint8)


def accumulate(wire: Tensor, dtype: torch.dtype, out: Tensor, weight: float) -> None:
    # a received wire may start anywhere, a view as 16-bit words needs an even address
    words = (wire if wire.storage_offset() % 2 == 0 else wire.clone()).view(dtype)
    for a in range(0, out.numel(), _CHUNK):
        out[a : a + _CHUNK] += words[a : a + _CHUNK].float() * weight
