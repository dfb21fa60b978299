"""Local steps while the last round's average is still on its way."""

from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.schedule import Schedule
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
    """Every `every` steps: land the average launched a round ago, pull towards it, launch the next.

    D = mean_i (a - x_i), launched after the last pull;  v = beta (lr_t / lr_(t-1)) v - D;  a += v;
    x_i = (1 - alpha) x_i + alpha a.  `by_lr=False` leaves the ratio out, with which v follows a learning rate that changes:
    else steps taken at a large rate would go on to move the anchor after it has been cut.
    The average travels during `delay` steps, a whole round unless said otherwise, so a slow network costs nothing until it
    is slower than that. It lands by schedule, never by arrival; with a delay of 0 it is waited for, and alpha may be 1,
    which is `local_sgd` if beta is 0. (1 - alpha) mean x + alpha a is conserved by the mixing, so with a constant gradient the
    model moves (1 - alpha) / (1 - alpha beta) times as fast as with plain averaging: raise the learning rate accordingly.
    A round whose average is not finite is dropped: when it should land, every rank returns to the anchor.

    Use: where an average takes as long as a few local steps.

    Not for: networks slower than a round, nor a learning rate left as it was.

    Wire: the exchange's bytes once per `every` steps, hidden behind computing.

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
        require(
            0 <= self.beta < 1,
            f"overlap_local_sgd: beta must lie in [0, 1), got {self.beta}; the paper uses 0.7",
        )

    @property
    def follows_rate(self) -> bool:
        return self.by_lr and self.beta > 0

    @property
    def period(self) -> int:
        return self.every

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, self.delay)

    def is_synced(self, step: int) -> bool:
        return self.delay == 0 and self.alpha == 1 and step % self.every == 0

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        held: list[Tensor] | None = None
        if self.delay != 0 and lands(loop.step, self.every, self.delay):
            held = yield from self._pull(loop)
        if loop.step % self.every:
            return
        yield from loop.launch(differences(loop, loop.parameters() if held is None else held))
        if self.delay == 0:
            yield from self._pull(loop)

    def _pull(self, loop: Loop) -> Program[list[Tensor]]:
        """Towards the anchor, which what has landed moves; all the way to it where that was not finite."""
        lost = loop.in_flight() and not (yield from self._land(loop))
        anchors = [s["anchor"] for s in loop.states]
        held = zip(loop.parameters(), anchors)
        pulled = [x.copy_(a) if lost else torch.lerp(x, a, self.alpha, out=x) for x, a in held]
        loop.assign(pulled)
        return pulled

    def _land(self, loop: Loop) -> Program[bool]:
        """Move the anchor; False if the average was not finite, and the anchor stays."""
        means = yield from loop.land()
        for place, mean, lr in zip(loop.places, means or [], loop.lrs):
            state = place.states["schedule"]
            velocity = slow_velocity(state, mean.neg_(), lr, self.beta, self.by_lr)
            state["anchor"] = torch.add(state["anchor"], velocity, out=place.layout.buffers.like(velocity))
        return means is not None
