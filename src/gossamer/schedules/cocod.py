"""CoCoD-SGD: the average arrives a round later, and local progress made meanwhile is kept."""

from functools import cached_property
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.rounds import just_before_landing, lands, refuse_delay, remember_anchor


@final
@part("cocod", sample="cocod(8)")
class CoCoD(Schedule):
    """Every `every` steps: takes the average launched a round ago, adds the local progress since, launches the next.

    s_i: the model as it was launched.  D = mean_i (a - s_i);  a -= D, which is mean s;  x_i = a + (x_i - s_i).  So the mean
    of models moves by the mean of all progress, with the learning rate unchanged, and ranks differ by their progress in one
    round. The average is in flight for `delay` steps, by default a whole round; with 0 it is `local_sgd`. It is applied at a
    fixed step, however early it arrives, and passes through the recipe's memory and exchange.
    If an average is not finite, it is dropped: at the step where it would be applied, every rank returns to the anchor.

    On one rank it is plain training.

    Use: when an average takes as long as a few local steps, and the learning rate should stay unchanged.

    Not for: long rounds with very different data per rank, because only the average keeps ranks together; machines short of
    memory, because it keeps two more copies of the model.

    Wire: the exchange's bytes once per `every` steps, overlapped with computing.

    >>> CoCoD(every=8)
    cocod(8)

    Paper: Shen, Xu, Liu, Cheng, Faster Distributed Deep Net Training: Computation and Communication Decoupled Stochastic
    Gradient Descent, IJCAI 2019.
    """

    every: Annotated[int, Choice(2, 4, 8, 12, 24)]
    delay: int | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"cocod: every must be at least 1 step, got {self.every}")
        refuse_delay("cocod", self.delay, self.every)

    def policy(self, key: str) -> Policy:
        return "mean" if key == "start" else "equal"

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, syncs=self.delay == 0, outlasts="flights")

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, self.delay)

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        if self.delay != 0 and lands(loop.step, self.every, self.delay) and loop.averages.in_flight():
            yield from self._land(loop)
        if loop.step % self.every:
            return
        if not loop.averages.in_flight():  # else this rank has come while the others waited for it
            yield from self._launch(loop)
        if self.delay == 0:
            yield from self._land(loop)

    def _launch(self, loop: Loop) -> Program[None]:
        moved = list[Tensor]()
        for bucket, x in zip(loop.buckets, loop.parameters()):
            state = bucket.states["schedule"]
            state["start"] = x
            moved.append(torch.sub(state["anchor"], x, out=bucket.layout.buffers.like(x)))
        yield from loop.averages.launch(moved)

    def _land(self, loop: Loop) -> Program[None]:
        means = yield from loop.averages.wait()
        models = loop.parameters()
        for bucket, mean, x in zip(loop.buckets, means or [], models):
            state = bucket.states["schedule"]
            start = state.get("start", state["anchor"])  # a rank that has come since the launch began at the anchor
            x.sub_(start)
            state["anchor"] = torch.sub(state["anchor"], mean, out=mean)
            x.add_(state["anchor"])
        loop.assign(models if means is not None else [s["anchor"] for s in loop.states])
