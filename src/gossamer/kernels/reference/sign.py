"""Sign bits, and the lengths of segments."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.kernels.layout import SUM_GROUP, Bounds
from gossamer.kernels.reference.planes import pack, spread, unpack


def encode(x: Tensor, bounds: Bounds, power: int, out: Tensor) -> Tensor:
    out.copy_(pack((x >= 0).to(torch.uint8), 1))
    return lengths(x, bounds, power)


def read(wire: Tensor, bounds: Bounds, units: Tensor, out: Tensor, anew: bool) -> None:
    unit = spread(units, bounds)
    said = torch.where(unpack(wire, 1, out.numel()) > 0, unit, -unit)
    out.copy_(said if anew else out + said)


def lengths(x: Tensor, bounds: Bounds, power: int) -> Tensor:
    """mean |x| per segment, or its root mean square."""
    out = torch.zeros(len(bounds) - 1, dtype=torch.float64, device=x.device)
    for i, (a, b) in enumerate(pairwise(bounds)):
        if b > a:
            out[i] = _sum(x[a:b].abs() if power == 1 else x[a:b].double().square()) / (b - a)
    return (out if power == 1 else out.sqrt()).float()


def _sum(x: Tensor) -> Tensor:
    """Float64 sum in one order for all backends.

    Rows of 64 are added one after another within a group; then halves onto halves, of the groups and of the lanes.
    """
    rows = pad(x, (0, -x.numel() % SUM_GROUP)).double().view(-1, SUM_GROUP // 64, 64)
    lanes = rows[:, 0]
    for i in range(1, SUM_GROUP // 64):
        lanes = lanes + rows[:, i]
    return _halve(_halve(lanes))


def _halve(x: Tensor) -> Tensor:
    x = pad(x.T, (0, (1 << (x.shape[0] - 1).bit_length()) - x.shape[0])).T if x.dim() > 1 else x
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return x[0]
