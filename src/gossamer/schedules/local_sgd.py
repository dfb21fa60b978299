"""Local SGD: local steps, then an average."""

from functools import cached_property
from typing import Annotated, final

from gossamer.core.constraints import those
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import Program
from gossamer.schedules.slowmo import SlowMo


@final
@part("local_sgd", sample="local_sgd(8)")
class LocalSGD(Schedule):
    """Takes `every` local steps, then averages models exactly: SlowMo with beta 0 and alpha 1.

    D = mean_i (a - x_i);  x_i = a = a - D.  During the first `warmup` steps it averages at every step. On one rank it is
    plain training.

    Use: on links of high latency, or too slow for a message at every step.

    Not for: long rounds with very different data per rank, because models drift apart between averages.

    Wire: the exchange's bytes once per `every` steps.

    >>> LocalSGD(every=8)
    local_sgd(8)

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """

    every: Annotated[int, Choice(2, 4, 8, 12, 24)]
    warmup: int = 0

    def __post_init__(self) -> None:
        require(self.every >= 1, f"local_sgd: every must be at least 1 step, got {self.every}; 4 to 16 are usual")
        require(self.warmup >= 0, f"local_sgd: warmup must be 0 steps or more, got {self.warmup}")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(rounds=True)

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, prelude=self.warmup, syncs=True, outlasts="round")

    def ends_round(self, step: int) -> bool:
        return step <= self.warmup or step % self.every == 0

    def step(self, loop: Loop) -> Program[None]:
        rounds = SlowMo(1 if loop.step <= self.warmup else self.every, beta=0.0)
        yield from rounds.step(loop)
