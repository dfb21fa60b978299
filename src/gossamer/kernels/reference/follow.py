"""The push-sum update: a step on x, computed at z = x / w."""

from collections.abc import Sequence

import torch
from torch import Tensor


def follow(
    model: Sequence[Tensor], before: Tensor | float, kept: Tensor, came: Tensor | None, w: float, x: Tensor
) -> None:
    def number(value: float) -> Tensor:  # by a plain number GPUs would multiply with its reciprocal
        return kept.new_full((), value)

    torch.cat([*model], out=x)
    x.sub_(before if isinstance(before, Tensor) else kept / number(before)).add_(kept)
    if came is not None:
        x.add_(came)
    divisor = number(w)
    for piece, stepped in zip(model, x.split([piece.numel() for piece in model]), strict=True):
        torch.div(stepped, divisor, out=piece)
