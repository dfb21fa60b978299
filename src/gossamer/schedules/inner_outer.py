"""Local steps with an inner learning rate, and a step per round with the full one."""

from functools import cached_property
from typing import Annotated, final

import torch

from gossamer.core.contracts import Policy
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, Range
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.local_sgd import LocalSGD
from gossamer.schedules.rounds import remember_anchor, return_to_anchor


@final
@part("inner_outer", sample="inner_outer(8)")
class InnerOuter(Schedule):
    """Takes `every` local steps at `inner` times the learning rate, then applies their mean at the full rate.

    x_i = a - inner m_i, with m_i the sum of the optimizer's steps in this round, each taken at x_i;  a = a - mean m_i. The
    optimizer's learning rate is the outer rate, and `inner` times it is the inner rate. `inner=1` is local SGD, bit for bit.
    `inner=0` takes all gradients at the anchor: minibatch SGD with `every` times the learning rate. If an average is
    not finite, the round is dropped: every rank returns to the anchor.

    A single rank uses both rates too.

    Use: ranks with different data: a small inner rate keeps models close, a large outer rate keeps progress fast.

    Not for: machines short of memory, because it keeps two more copies of the model.

    Wire: the exchange's bytes once per `every` steps.

    >>> InnerOuter(8, inner=0.25)
    inner_outer(8, inner=0.25)

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """

    every: Annotated[int, Choice(2, 4, 8, 12, 24)]
    inner: Annotated[float, Range(0.0, 1.0)] = 0.5

    def __post_init__(self) -> None:
        require(self.every >= 1, f"inner_outer: every must be at least 1 step, got {self.every}; 4 to 48 are usual")
        require(
            0 <= self.inner <= 1,
            f"inner_outer: inner must lie in [0, 1], got {self.inner}; it is the inner rate divided by the outer one",
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, works_alone=self.inner != 1, syncs=True)

    def policy(self, key: str) -> Policy:
        return "equal" if key == "anchor" else "mean"

    def step(self, loop: Loop) -> Program[None]:
        if self.inner == 1:  # equal to local SGD, with its rounding
            yield from LocalSGD(self.every).step(loop)
            return
        remember_anchor(loop, loop.parameters)
        before = loop.parameters()
        yield OptimizerStep()
        for state, x, after in zip(loop.states, before, loop.parameters(), strict=True):
            state["moved"] = torch.sub(x, after, out=after).add_(state.get("moved", 0.0))
        if loop.step % self.every:
            held = zip(loop.states, before, strict=True)
            loop.write([torch.sub(s["anchor"], s["moved"], alpha=self.inner, out=room) for s, room in held])
            return
        means = yield from loop.averages.of([s.pop("moved") for s in loop.states])
        for state, mean in zip(loop.states, means or []):
            state["anchor"] = torch.sub(state["anchor"], mean, out=mean)
        return_to_anchor(loop)
