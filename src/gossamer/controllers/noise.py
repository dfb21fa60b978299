"""Noise and signal in gradients, told by how long ranks' own ones are and how long their mean is."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Facts
from gossamer.core.stream_events import read_numbers

TELLS = 2  # numbers of a block: its squared length, and one for the rank
MEMORY = 1000.0  # of so many ranks' gradients, in all
LEAST = 1e-30  # of a variance, that is divided by


class Noise(NamedTuple):
    """Running estimates for the gradient of one rank's batch; and how many such batches a step is made of."""

    variance: float
    signal: float  # squared length of the true gradient
    batches: float

    @property
    def gain(self) -> float:
        """How many steps with one batch a step with all of them is worth: 1 if all tell the same, S if all is noise."""
        return (self.variance + self.signal) / (self.variance / self.batches + self.signal)

    @property
    def scale(self) -> float:
        """The number of batches at which a mean has as much noise as signal."""
        return self.variance / max(self.signal, LEAST)


def needs_a_mean_without_noise(instead: str) -> Constraint:
    """Of an exchange that adds noise of its own the estimates would be of that, too; `instead` is what else there is to do."""
    because = "{controller} goes by the length of the mean, and {exchange} leaves noise of its own in it; use allreduce(fp32()), or "
    return requires("exact", because=because + instead)


def tell(block: Bucket) -> Tensor:
    """What a rank tells of its own gradient."""
    flat = block.flat.double()
    return torch.stack([flat.square().sum(), flat.new_ones(())])


def look(facts: Facts, state: State) -> Noise:
    """With A = sum |g_i|^2, B = |mean g|^2 and S ranks:  var = (A - S B) / (S - 1),  sqr = B - var / S, both unbiased.

    They are averaged over some thousand gradients, without a bias for where they began, and only then kept from below zero.
    """
    total, ranks, mean = _numbers(facts.blocks, facts.sums)
    if ranks < 2:
        return Noise(0.0, 1.0, 1.0)
    variance = (total - ranks * mean) / (ranks - 1)
    keep = max(1 - ranks / MEMORY, 0.0)
    known = state.get("noise", torch.zeros(3, dtype=torch.float64))
    new = torch.tensor([variance, mean - variance / ranks, 1.0], dtype=torch.float64)
    state["noise"] = known = keep * known + (1 - keep) * new
    var, sqr, weight = known.tolist()
    return Noise(max(var / weight, LEAST), max(sqr / weight, 0.0), ranks)


def _numbers(blocks: Sequence[Bucket], sums: Sequence[Tensor]) -> tuple[float, float, float]:
    """The one time that the host asks its device."""
    squares = torch.stack([block.flat.double().square().sum() for block in blocks]).sum()
    told = torch.stack([s.view(-1) for s in sums])
    total, ranks, mean = read_numbers(told[:, 0].sum(), told[0, 1], squares.to(told.device))
    return total, ranks, mean
