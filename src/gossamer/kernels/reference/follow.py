"""A step on x, taken where z = x / w was, as torch does it: in pieces that are still near at the next pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

_NEAR = 2**17  # elements


def follow(model: Tensor, before: Tensor, kept: Tensor, came: Tensor | None, w: float, x: Tensor, z: Tensor) -> None:
    by = model.new_full((), w)  # by a plain number GPUs would multiply with its reciprocal
    beside = [each.split(_NEAR) for each in (before, kept, x, z, *([] if came is None else [came]))]
    for piece, b, k, into, ratio, *more in zip(model.split(_NEAR), *beside, strict=True):
        torch.sub(piece, b, out=into).add_(k)
        for each in more:
            into.add_(each)
        piece.copy_(torch.div(into, by, out=ratio))
