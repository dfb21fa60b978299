"""A step on x, taken where z = x / w was: each number is read once, and nothing waits in memory in between."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

from gossamer.kernels.cpu.compile import Doubles, Floats, kernel

Numbers = TypeVar("Numbers", Floats, Doubles)


def follow(model: Tensor, before: Tensor, kept: Tensor, came: Tensor | None, w: float, x: Tensor, z: Tensor) -> None:
    values, there = model.numpy(), (before.numpy(), kept.numpy())
    by = values.dtype.type(w)
    if came is None:
        _follow(values, *there, by, x.numpy(), z.numpy())
    else:
        _follow_with(values, *there, came.numpy(), by, x.numpy(), z.numpy())


@kernel
def _follow(model: Numbers, before: Numbers, kept: Numbers, w: np.floating, x: Numbers, z: Numbers) -> None:
    for i in range(model.size):
        moved = (model[i] - before[i]) + kept[i]
        ratio = moved / w
        x[i], z[i], model[i] = moved, ratio, ratio


@kernel
def _follow_with(
    model: Numbers, before: Numbers, kept: Numbers, came: Numbers, w: np.floating, x: Numbers, z: Numbers
) -> None:
    for i in range(model.size):
        moved = ((model[i] - before[i]) + kept[i]) + came[i]
        ratio = moved / w
        x[i], z[i], model[i] = moved, ratio, ratio
