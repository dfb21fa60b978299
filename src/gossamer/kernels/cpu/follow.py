"""The push-sum update: a step on x, computed at z = x / w, in one pass without temporary tensors."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from torch import Tensor

from gossamer.kernels.cpu.compile import Doubles, Floats, kernel

Numbers = TypeVar("Numbers", Floats, Doubles)


def follow(
    model: Sequence[Tensor], before: Tensor | float, kept: Tensor, came: Tensor | None, w: float, x: Tensor
) -> None:
    kind, start = kept.numpy().dtype.type, 0
    old, was = (before.numpy(), kind(1)) if isinstance(before, Tensor) else (None, kind(before))
    beside, news, into = kept.numpy(), None if came is None else came.numpy(), x.numpy()
    for piece in model:
        values = piece.numpy()
        here = slice(start, start := start + values.size)
        told = None if old is None else old[here]
        new = None if news is None else news[here]
        _follow(values, told, was, beside[here], new, kind(w), into[here])


@kernel  # once for each of what is given and what is not
def _follow(
    model: Numbers,
    before: Numbers | None,
    was: np.floating,
    kept: Numbers,
    came: Numbers | None,
    w: np.floating,
    x: Numbers,
) -> None:
    for i in range(model.size):
        z = kept[i] / was if before is None else before[i]
        moved = (model[i] - z) + kept[i]
        if came is not None:
            moved += came[i]
        x[i], model[i] = moved, moved / w
