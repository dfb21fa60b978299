"""Lookahead: slow weights follow fast weights, on one rank too."""

from functools import cached_property
from typing import Annotated, final

from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.slowmo import SlowMo


@final
@part("lookahead")
class Lookahead(Schedule):
    """Takes `every` steps, then keeps a part of the way: a += alpha (mean_i x_i - a);  x_i = a.

    On one rank it is Lookahead around the optimizer, whose state is kept; on several ranks it is `slowmo` without
    momentum, and `alpha=1` is local SGD. The difference passes through the recipe's memory and exchange.

    Use: around an optimizer with large or noisy steps, on one rank or many: its average has less noise.

    Not for: faster training at an unchanged learning rate: only a share `alpha` of every step is kept, so raise the rate.

    Wire: the exchange's bytes once per `every` steps; nothing on one rank.

    >>> Lookahead(every=6)
    lookahead(every=6)

    Paper: Zhang, Lucas, Hinton, Ba, Lookahead Optimizer: k steps forward, 1 step back, NeurIPS 2019.
    """

    every: Annotated[int, Choice(5, 10, 20)] = 5
    alpha: Annotated[float, Range(0.3, 0.8)] = 0.5

    def __post_init__(self) -> None:
        require(self.every >= 1, f"lookahead: every must be at least 1 step, got {self.every}; the paper uses 5 and 10")
        require(
            0 < self.alpha <= 1,
            f"lookahead: alpha must lie in (0, 1], got {self.alpha}: 0 freezes the model; the paper uses 0.5 and 0.8",
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, works_alone=True, syncs=True)

    def step(self, loop: Loop) -> Program[None]:
        if loop.ranks.size == 1 and self.alpha == 1:
            yield OptimizerStep()
            return
        yield from SlowMo(self.every, beta=0.0, alpha=self.alpha).step(loop)
