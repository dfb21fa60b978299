"""Average gradients at every step."""

from functools import cached_property
from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program


@final
@part("every_step")
class EveryStep(Schedule):
    """Averages gradients at every step, then steps the optimizer: synchronous training.

    The gradients of `micro_batches` micro-batches make one step (gradient accumulation; see `comm.accumulating()`), with the
    learning rate times `rate`. A single rank does the same.

    `l1` minimises f(x) + l1 |x|_1, for sparse models: each step is followed by x = sign(x) max(|x| - s lr l1, 0). Momentum
    makes the step for a constant gradient s times as long, so the threshold is multiplied by s too. With
    momentum b and dampening t, s = (1 - t) / (1 - b), under Nesterov 1 + b (1 - t) / (1 - b), without momentum 1; the momentum
    of a memory (`diana(momentum=...)`) multiplies it. `l1` needs torch.optim.SGD: other optimizers scale each element's step
    differently, and would solve another problem.

    Use: unless a message at every step is too slow. It is the default of every recipe.

    >>> EveryStep(l1=0.05)
    every_step(l1=0.05)
    """

    micro_batches: int = 1
    rate: float = 1.0
    l1: float = 0.0

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, f"every_step: micro_batches must be at least 1, got {self.micro_batches}")
        require(self.rate > 0, f"every_step: rate must be positive, got {self.rate}")
        require(self.l1 >= 0, f"every_step: l1 must not be negative, got {self.l1}")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(batch=True, own_step=self.l1 > 0)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        if not self.l1:
            return ()
        because = "{schedule} under {update}: the threshold needs the gradient's length, which the update removes; leave l1 out"
        return (excludes("directs", because=because),)

    @cached_property
    def shape(self) -> Shape:
        return Shape(
            averages_gradients=True,
            steps_alike=self.l1 == 0 and self.rate == 1,
            works_alone=True,
            nests=True,
            micro_batches=self.micro_batches,
            lr_factor=self.rate,
            outlasts="step",
        )

    @property
    def follows_rate(self) -> bool:
        return self.l1 > 0

    def step(self, loop: Loop) -> Program[None]:
        yield from loop.averages.wait_gradients()
        stepped = yield OptimizerStep()
        if self.l1 and stepped:
            pairs = zip(loop.optimizer.gains, loop.optimizer.lrs, strict=True)
            thresholds = [gain * (lr * self.rate) * self.l1 for gain, lr in pairs]
            loop.assign([_shrunk(*pair) for pair in zip(loop.blocks(), thresholds, strict=True)])

    def fits(self, binding: Binding) -> None:
        other = binding.other_than_sgd(lambda group: group["momentum"] < 1) if self.l1 else None
        if other is None:
            return
        raise AttachError(
            f"{self} with {type(other).__name__}: l1 needs the step of torch.optim.SGD, with momentum below 1. "
            "Another optimizer scales each element's step differently, and would solve another "
            "problem; use torch.optim.SGD, or leave l1 out"
        )


def _shrunk(block: Bucket, threshold: float) -> Tensor:
    """Return the bucket's elements shrunk by `threshold`. (In torch's softshrink the sign of a zero depends on the size.)"""
    near = torch.clamp(block.flat, -threshold, threshold, out=block.new())
    return torch.sub(block.flat, near, out=near)
