"""Measures the compression error."""

from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket


def relative_errors(block: Bucket, add_sent: Callable[[Tensor, float], None]) -> dict[str, float]:
    """The relative compression error |lost| / |input| of each parameter, with one transfer from the device."""
    lost = block.flat.clone()
    add_sent(lost, -1.0)
    names = [s.name for s in block.layout.segments]
    norms = torch.stack([t.norm() for b in (block, block.like(lost)) for _, t in b.tensors()]).tolist()
    pairs = zip(names, norms, norms[len(names) :])
    return {name: gone / given if given else 0.0 for name, given, gone in pairs}
