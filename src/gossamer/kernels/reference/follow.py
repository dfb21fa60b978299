"""The push-sum update: a step on x, computed at z = x / w; on a CPU in pieces that stay in cache between passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NEAR = 2**17  # elements


def follow(
    model: Sequence[Tensor], before: Tensor | float, kept: Tensor, came: Tensor | None, w: float, x: Tensor
) -> None:
    def number(value: float) -> Tensor:  # by a plain number GPUs would multiply with its reciprocal
        return kept.new_full((), value)

    if kept.device.type != "cpu":  # where each call costs a launch
        torch.cat([*model], out=x)
        x.sub_(before if isinstance(before, Tensor) else kept / number(before)).add_(kept)
        if came is not None:
            x.add_(came)
        divisor = number(w)
        for piece, stepped in zip(model, x.split([piece.numel() for piece in model]), strict=True):
            torch.div(stepped, divisor, out=piece)
        return
    start = 0
    for piece in (part for whole in model for part in whole.split(_NEAR)):
        here = slice(start, start := start + piece.numel())
        was = before[here] if isinstance(before, Tensor) else kept[here] / number(before)
        torch.sub(piece, was, out=x[here]).add_(kept[here])
        if came is not None:
            x[here] += came[here]
        torch.div(x[here], number(w), out=piece)
