"""Rounds: what schedules of local steps share: an anchor, the mean move away from it, and an outer step.

The outer step is one rule: v = beta v + D;  a -= alpha v, and under Nesterov a -= alpha (D + beta v). SlowMo scales v by the
learning rate, block momentum does not, Lookahead and Local SGD have beta 0, DiLoCo uses Nesterov.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Layout, State
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import require
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program


class OuterStep(NamedTuple):
    """The rule by which an anchor follows the mean D = mean_i (a - x_i) of a round."""

    beta: float
    alpha: float = 1.0
    by_lr: bool = True
    nesterov: bool = False

    def take(self, bucket: BucketView, moved: Tensor, lr: float) -> None:
        """Move one bucket's anchor; `moved` is overwritten."""
        self.follow(bucket.states["schedule"], bucket.layout, moved, lr)

    def follow(self, state: State, layout: Layout, moved: Tensor, lr: float) -> None:
        """Move the anchor in `state`; `moved` is overwritten."""
        room = layout.buffers.like(moved)
        ahead = room.copy_(moved) if self.nesterov else room
        velocity = slow_velocity(state, moved, lr, self.beta, self.by_lr)
        if self.nesterov:
            step = ahead.add_(velocity, alpha=self.beta).mul_(self.alpha)
        else:
            step = torch.mul(velocity, self.alpha, out=ahead)
        state["anchor"] = torch.sub(state["anchor"], step, out=step)


class LocalSteps(Schedule):
    """The default base of a round: every rank takes a local optimizer step."""

    @cached_property
    def shape(self) -> Shape:
        return Shape(nests=True)

    def step(self, loop: Loop) -> Program[None]:
        yield OptimizerStep()


def slow_velocity(state: State, moved: Tensor, lr: float, beta: float, by_lr: bool) -> Tensor:
    """v = beta (lr_t / lr_(t-1)) v + moved, kept in `state` where `moved` was; without `by_lr` the ratio is left out."""
    if beta == 0:
        return moved
    velocity, last = state.get("velocity"), float(state.get("lr", torch.zeros((), dtype=torch.float32)))
    ratio = lr / last if by_lr and last else float(not by_lr)
    if velocity is not None:
        moved.add_(velocity, alpha=beta * ratio)
    state["velocity"], state["lr"] = moved, torch.tensor(lr, dtype=torch.float64)
    return moved


def remember_anchor(loop: Loop, held: Callable[[], Sequence[Tensor]]) -> None:
    """Set the anchor to the model of the first step; parameters added later get theirs when they are added."""
    if any("anchor" not in s for s in loop.states):
        for state, x in zip(loop.states, held()):
            state.setdefault("anchor", x)


def differences(loop: Loop, held: Sequence[Tensor]) -> list[Tensor]:
    """Return anchor minus model, written over `held`; it has the sign of a gradient."""
    return [torch.sub(s["anchor"], x, out=x) for s, x in zip(loop.states, held)]


def return_to_anchor(loop: Loop) -> None:
    """Write the anchor to the parameters, and clear the mixer's state (every rank has the weight 1 again)."""
    loop.assign([s["anchor"] for s in loop.states])
    for state in loop.mixing:
        state.clear()


def lands(step: int, every: int, delay: int | None) -> bool:
    """True if the average in flight is applied after this step: `delay` steps after its launch."""
    return step % every == (every if delay is None else delay) % every


def just_before_landing(step: int, every: int, delay: int | None) -> bool:
    """True at the step before the average is applied; with a delay of 0, at the end of the round."""
    return step % every == 0 if delay == 0 else lands(step + 1, every, delay)


def refuse_delay(name: str, delay: int | None, every: int) -> None:
    require(
        delay is None or 0 <= delay <= every,
        f"{name}: delay={delay} in rounds of {every} steps: the next average would start before the last one is applied, and "
        f"only one may be in flight; use 0 to {every} steps",
    )
