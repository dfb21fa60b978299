"""Are these numbers, all of them?"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer import kernels


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """One question to the device for all of them."""
    peaks = list[Tensor]()
    for t in tensors:
        if t.numel():
            wide = t.dtype != torch.float32
            peaks.append(t.abs().amax() if wide else kernels.absmax(t.reshape(-1), (0, t.numel())).view(()))
    return not peaks or bool(torch.stack([p.isfinite() for p in peaks]).all())
