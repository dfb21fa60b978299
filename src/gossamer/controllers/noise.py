"""Gradient noise and signal, estimated from the norms of the ranks' gradients and of their mean."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Controller, Exchange, Facts
from gossamer.core.stream_events import read_numbers

MEMORY = 1000.0  # of so many ranks' gradients, in all
LEAST = 1e-30  # of a variance, that is divided by


class Noise(NamedTuple):
    """Running estimates for the gradient of one rank's batch, and the number of such batches per step."""

    variance: float
    signal: float  # squared length of the true gradient
    batches: float

    @property
    def gain(self) -> float:
        """Gain of a step with all batches over a step with one: 1 if gradients are equal, S if all is noise."""
        return (self.variance + self.signal) / (self.variance / self.batches + self.signal)

    @property
    def scale(self) -> float:
        """The number of batches at which a mean has as much noise as signal."""
        return self.variance / max(self.signal, LEAST)


def needs_a_mean_without_noise(instead: str) -> Constraint:
    """Constraint for exact exchanges: the noise of another one would enter the estimates; `instead` ends the error's advice."""
    because = "{controller} measures the norm of the mean, and {exchange} adds its own noise to it; use allreduce(fp32()), or "
    return requires("exact", because=because + instead)


class NoiseController(Controller):
    """A controller that hears the noise of gradients, and changes the schedule's batch or rate for it."""

    @property
    def moves_schedule(self) -> bool:
        return True

    @property
    def hears_rate(self) -> bool:
        return False

    @property
    def counts(self) -> int:
        return 2

    def local(self, block: Bucket, exchange: Exchange) -> Tensor:
        """A rank's squared norm of its own gradient, and a one to count ranks."""
        flat = block.flat.double()
        return torch.stack([flat.square().sum(), flat.new_ones(())])


def look(facts: Facts, state: State) -> Noise:
    """Update the estimates of noise and signal from one step.

    With A = sum |g_i|^2, B = |mean g|^2 and S ranks:  var = (A - S B) / (S - 1),  sqr = B - var / S, both unbiased. They are
    averaged over about a thousand gradients, with bias correction, and clipped at zero only afterwards.
    """
    total, ranks, mean = _numbers(facts.blocks, facts.sums)
    if ranks < 2:
        return Noise(0.0, 1.0, 1.0)
    variance = (total - ranks * mean) / (ranks - 1)
    keep = max(1 - ranks / MEMORY, 0.0)
    known = state.get("noise", torch.zeros(3, dtype=torch.float64)).cpu()  # a checkpoint puts it beside the model
    new = known.new_tensor([variance, mean - variance / ranks, 1.0])
    state["noise"] = known = keep * known + (1 - keep) * new
    var, sqr, weight = known.tolist()
    return Noise(max(var / weight, LEAST), max(sqr / weight, 0.0), ranks)


def _numbers(blocks: Sequence[Bucket], sums: Sequence[Tensor]) -> tuple[float, float, float]:
    """Read the statistics from the device, in one transfer."""
    squares = torch.stack([block.flat.double().square().sum() for block in blocks]).sum()
    told = torch.stack([s.view(-1) for s in sums])
    total, ranks, mean = read_numbers(told[:, 0].sum(), told[0, 1], squares.to(told.device))
    return total, ranks, mean
