"""Average gradients at every step."""

from typing import final

import torch

from gossamer.core.contracts import Loop, Schedule
from gossamer.core.parts import part, require
from gossamer.core.verbs import Descend, Program


@final
@part("every_step")
class EveryStep(Schedule):
    """Gradients are averaged, then the optimizer steps: synchronous training.

    `micro_batches` of them make one step (gradient accumulation; see `comm.accumulating()`), with the learning rate times
    `rate`. `l1` follows each step with the proximal map of l1 |x|_1: x = sign(x) max(|x| - lr l1, 0), for sparse models.
    All of it holds for a rank alone as well.

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
    def averages_gradients(self) -> bool:
        return True

    @property
    def accumulate(self) -> int:
        return self.micro_batches

    @property
    def lr_factor(self) -> float:
        return self.rate

    def step(self, loop: Loop) -> Program[None]:
        yield from loop.average_gradients()
        descended = yield Descend()
        if self.l1 and descended:
            shrunk = [torch.nn.functional.softshrink(x, lr * self.l1) for x, lr in zip(loop.parameters(), loop.lrs)]
            loop.assign(shrunk)
