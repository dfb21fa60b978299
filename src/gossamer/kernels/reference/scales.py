"""Magnitude and deviation per segment."""

from itertools import pairwise

import torch
from torch import Tensor

from gossamer.kernels.layout import Bounds


def absmax(x: Tensor, bounds: Bounds) -> Tensor:
    # as integers, magnitudes keep their order and every NaN lies above infinity
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    out = x.new_zeros(len(bounds) - 1, dtype=torch.int32)
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            out[i] = magnitude[a:b].max()
    return out.view(torch.float32)


def absmax_and_rms(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    rms = x.new_zeros(len(bounds) - 1, dtype=torch.float64)
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            rms[i] = x[a:b].double().square().mean().sqrt()
    return absmax(x, bounds), rms.float()


def absmax_and_std(x: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    std = x.new_zeros(len(bounds) - 1, dtype=torch.float64)
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            centred = x[a:b].double() - x[a]
            std[i] = (centred - centred.mean()).square().mean().sqrt()
    return absmax(x, bounds), std.float()
