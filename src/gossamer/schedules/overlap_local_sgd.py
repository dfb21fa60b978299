"""Overlap local SGD: local steps while the last round's average is in flight."""

from functools import cached_property
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.rounds import (
    differences,
    just_before_landing,
    lands,
    refuse_delay,
    remember_anchor,
    slow_velocity,
)


@final
@part("overlap_local_sgd", sample="overlap_local_sgd(8)")
class OverlapLocalSGD(Schedule):
    """Every `every` steps: takes the average launched a round ago, pulls models towards it, launches the next.

    D = mean_i (a - x_i), launched after the last pull;  v = beta (lr_t / lr_(t-1)) v - D;  a += v;
    x_i = (1 - alpha) x_i + alpha a.  `by_lr=False` leaves the ratio out. With it v follows changes of the learning rate:
    without it, steps taken at a large rate go on to move the anchor after the rate is cut.
    The average is in flight for `delay` steps, by default a whole round, so a network costs no time until it is slower than
    that. It is applied at a fixed step, however early it arrives. With a delay of 0 it is waited for, and alpha may be 1,
    which is `local_sgd` if beta is 0. (1 - alpha) mean x + alpha a is conserved by the mixing, so with a constant gradient the
    model moves (1 - alpha) / (1 - alpha beta) times as fast as with plain averaging: raise the learning rate accordingly.
    If an average is not finite, it is dropped: at the step where it would be applied, every rank returns to the anchor.

    On one rank the model is pulled to its own anchor.

    Use: when an average takes as long as a few local steps.

    Not for: networks on which an average takes longer than a round; an unchanged learning rate.

    Wire: the exchange's bytes once per `every` steps, overlapped with computing.

    >>> OverlapLocalSGD(every=8)
    overlap_local_sgd(8)

    Paper: Wang, Liang, Joshi, Overlap Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD,
    ICASSP 2020.
    """

    every: Annotated[int, Choice(2, 4, 8, 12, 24)]
    alpha: Annotated[float, Range(0.3, 0.8)] = 0.6
    beta: Annotated[float, Range(0.0, 0.8)] = 0.7
    by_lr: bool = True
    delay: int | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"overlap_local_sgd: every must be at least 1 step, got {self.every}")
        refuse_delay("overlap_local_sgd", self.delay, self.every)
        require(
            0 < self.alpha < 1 or (self.alpha == 1 and self.delay == 0),
            f"overlap_local_sgd: alpha must lie strictly between 0 and 1, got {self.alpha}: "
            "1 freezes the model, 0 never synchronises; the paper uses 0.6",
        )
        require(0 <= self.beta < 1, f"overlap_local_sgd: beta must lie in [0, 1), got {self.beta}; the paper uses 0.7")

    @cached_property
    def shape(self) -> Shape:
        syncs, alone = self.delay == 0 and self.alpha == 1, self.alpha < 1 or self.beta > 0
        return Shape(period=self.every, syncs=syncs, works_alone=alone, outlasts="flights")

    @property
    def follows_rate(self) -> bool:
        return self.by_lr and self.beta > 0

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, self.delay)

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        held: list[Tensor] | None = None
        if self.delay != 0 and lands(loop.step, self.every, self.delay):
            held = yield from self._pull(loop)
        if loop.step % self.every:
            return
        if not loop.averages.in_flight():  # else this rank has come while the others waited for it
            yield from loop.averages.launch(differences(loop, loop.parameters() if held is None else held))
        if self.delay == 0:
            yield from self._pull(loop)

    def _pull(self, loop: Loop) -> Program[list[Tensor]]:
        """Apply the average to the anchor and pull the models towards it; all the way if the average was not finite."""
        lost = loop.averages.in_flight() and not (yield from self._land(loop))
        anchors = [s["anchor"] for s in loop.states]
        held = zip(loop.parameters(), anchors)
        pulled = [x.copy_(a) if lost else torch.lerp(x, a, self.alpha, out=x) for x, a in held]
        loop.assign(pulled)
        return pulled

    def _land(self, loop: Loop) -> Program[bool]:
        """Wait for the average and move the anchor; returns False, and leaves it, if the average was not finite."""
        means = yield from loop.averages.wait()
        for bucket, mean, lr in zip(loop.buckets, means or [], loop.optimizer.lrs):
            state = bucket.states["schedule"]
            velocity = slow_velocity(state, mean.neg_(), lr, self.beta, self.by_lr)
            state["anchor"] = torch.add(state["anchor"], velocity, out=bucket.layout.buffers.like(velocity))
        return means is not None
