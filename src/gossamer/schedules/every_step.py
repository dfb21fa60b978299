"""Average gradients at every step."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket
from gossamer.core.constraints import Constraint, excludes, those
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep, Program


@final
@part("every_step")
class EveryStep(Schedule):
    """Gradients are averaged, then the optimizer steps: synchronous training.

    `micro_batches` of them make one step (gradient accumulation; see `comm.accumulating()`), with the learning rate times
    `rate`. All of it holds for a rank alone as well.

    `l1` minimises f(x) + l1 |x|_1, for sparse models: each step is followed by x = sign(x) max(|x| - s lr l1, 0). Momentum
    makes a step s times a gradient that stays, and so it does the threshold; else l1 would count s times less. With
    momentum b and dampening t, s = (1 - t) / (1 - b), under Nesterov 1 + b (1 - t) / (1 - b), without momentum 1; that of
    a memory (`diana(momentum=...)`) multiplies it. It takes torch's SGD: other optimizers scale each element's step in a
    way of its own, and would solve another problem.

    Use: unless messages are too many or too slow for every step; it is there unless a recipe says otherwise.

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
        because = "{schedule} under {update}: the threshold follows the gradient's length, which is gone; leave l1 out"
        return (excludes("directs", because=because),)

    @property
    def averages_gradients(self) -> bool:
        return True

    @property
    def nests(self) -> bool:
        return True

    @property
    def accumulate(self) -> int:
        return self.micro_batches

    @property
    def lr_factor(self) -> float:
        return self.rate

    @property
    def follows_rate(self) -> bool:
        return self.l1 > 0

    def step(self, loop: Loop) -> Program[None]:
        yield from loop.average_gradients()
        descended = yield OptimizerStep()
        if self.l1 and descended:
            thresholds = [gain * lr * self.l1 for gain, lr in zip(loop.gains, loop.lrs, strict=True)]
            loop.assign([_shrunk(*given) for given in zip(loop.blocks(), thresholds, strict=True)])

    def fits(self, binding: Binding) -> None:
        others = [o for o in binding.optimizers if not all(_is_sgd(group) for group in o.param_groups)]
        if not self.l1 or not others:
            return
        raise AttachError(
            f"{self} with {type(others[0]).__name__}: the threshold follows the step of torch.optim.SGD, with momentum below "
            "1 or without. Another optimizer scales every element's step by itself, and would end in the solution of another "
            "problem: use torch.optim.SGD, or leave l1 out"
        )


def _shrunk(block: Bucket, threshold: float) -> Tensor:
    """Not torch's softshrink, whose zeros have a sign that depends on how many elements there are."""
    near = torch.clamp(block.flat, -threshold, threshold, out=block.new())
    return torch.sub(block.flat, near, out=near)


def _is_sgd(group: Mapping[str, Any]) -> bool:
    """Whether an optimizer's parameter group is that of SGD, and of no relative that scales its steps."""
    return {"momentum", "dampening", "nesterov"} <= group.keys() and "eps" not in group and group["momentum"] < 1
