"""Local steps, then an average; and slow momentum over the rounds."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.block import State
from gossamer.core.contracts import Mixer
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Loop, Schedule, Share
from gossamer.core.verbs import Descend, Program
from gossamer.schedules import mixing


@final
@part("slowmo", sample="slowmo(8)")
class SlowMo(Schedule):
    """`every` local steps, an exact average, and a momentum step over the round.

    a: the anchor, equal on all ranks.  D = mean_i (a - x_i);  v = beta (lr_t / lr_(t-1)) v + D;  a -= alpha v;  x_i = a.
    The velocity form of the paper's u = v / lr: no division by a small rate. `by_lr=False` leaves the ratio out (block
    momentum). `inner` mixes parameters after each local step (SlowMo over stochastic gradient push). `buffers` says what
    becomes of the optimizer's state at a round: "maintain"; "reset", counters too, as a new optimizer has it; "average".

    The difference D passes through the recipe's memory and exchange, so it can be quantised like a gradient. A round whose
    average is not finite is dropped: every rank returns to the anchor.

    Use: on slow links and across sites; around gossip, to agree exactly now and then.

    Not for: machines short of memory: it keeps two more copies of the model.

    Wire: the exchange's bytes once per `every` steps, and the mixer's at each.

    >>> SlowMo(every=12)
    slowmo(12)

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum,
    ICLR 2020.
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    beta: Annotated[float, Range(0.0, 0.8)] = 0.7
    alpha: Annotated[float, LogRange(0.5, 2.0)] = 1.0
    by_lr: bool = True
    # Not "average", whose bytes nobody counts.
    buffers: Annotated[Literal["maintain", "reset", "average"], Choice("maintain", "reset")] = "maintain"
    inner: Mixer | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"slowmo: every must be at least 1 step, got {self.every}; the paper uses 12")
        require(0 <= self.beta < 1, f"slowmo: beta must lie in [0, 1), got {self.beta}; the paper uses 0.4 to 0.8")
        require(self.alpha > 0, f"slowmo: alpha must be positive, got {self.alpha}; 0 would freeze the model")

    @property
    def follows_rate(self) -> bool:
        return self.by_lr and self.beta > 0

    @property
    def drives(self) -> Mixer | None:
        return self.inner

    @property
    def period(self) -> int:
        return self.every

    def ends_round(self, step: int) -> bool:
        return self.inner is not None or step % self.every == 0

    def equal(self, step: int) -> bool:
        return step % self.every == 0

    def judged(self, loop: Loop) -> list[Share] | None:
        return super().judged(loop) if self.inner is None else mixing.shares(loop, self.inner)

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, lambda: self._held(loop))
        yield Descend()
        if self.inner is not None:
            yield from mixing.mix(loop, self.inner, loop.step - 1)
        if loop.step % self.every:
            return
        means = yield from loop.average(differences(loop, self._held(loop)))
        for place, mean, lr in zip(loop.places, means or [], loop.lrs):
            state = place.states["schedule"]
            velocity = slow_velocity(state, mean, lr, self.beta, self.by_lr)
            step = torch.mul(velocity, self.alpha, out=place.layout.buffers.like(velocity))
            state["anchor"] = torch.sub(state["anchor"], step, out=step)
        return_to_anchor(loop)
        if means is None:
            return
        if self.buffers == "reset":
            loop.reset_optimizer()
        elif self.buffers == "average":
            yield from loop.average_optimizer()

    def _held(self, loop: Loop) -> list[Tensor]:
        """What sums to the model over all ranks."""
        return loop.parameters() if self.inner is None else mixing.numerators(loop, self.inner)


@final
@part("local_sgd", sample="local_sgd(8)")
class LocalSGD(Schedule):
    """`every` local steps, then an exact average: SlowMo with beta 0 and alpha 1.

    D = mean_i (a - x_i);  x_i = a = a - D.  After `warmup` steps, during which it averages at every step.

    Use: on links of high latency, and where every step is too often.

    Not for: ranks whose data differ much, unless rounds are short: models drift apart in between.

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
    def period(self) -> int:
        return self.every

    @property
    def prelude(self) -> int:
        return self.warmup

    def ends_round(self, step: int) -> bool:
        return step <= self.warmup or step % self.every == 0

    def equal(self, step: int) -> bool:
        return self.ends_round(step)

    def step(self, loop: Loop) -> Program[None]:
        rounds = SlowMo(1 if loop.step <= self.warmup else self.every, beta=0.0)
        yield from rounds.step(loop)


def slow_velocity(state: State, moved: Tensor, lr: float, beta: float, by_lr: bool) -> Tensor:
    """v = beta (lr_t / lr_(t-1)) v + moved, kept in `state` where `moved` was; without `by_lr` the ratio is left out."""
    if beta == 0:
        return moved
    velocity, last = state.get("velocity"), float(state.get("lr", torch.zeros(())))
    ratio = lr / last if by_lr and last else float(not by_lr)
    if velocity is not None:
        moved.add_(velocity, alpha=beta * ratio)
    state["velocity"], state["lr"] = moved, torch.tensor(lr, dtype=torch.float64)
    return moved


def remember_anchor(loop: Loop, held: Callable[[], Sequence[Tensor]]) -> None:
    """At the first step, the anchor is the model all ranks start from; parameters that join later have theirs then."""
    if any("anchor" not in s for s in loop.states):
        for state, x in zip(loop.states, held()):
            state.setdefault("anchor", x)


def differences(loop: Loop, held: Sequence[Tensor]) -> list[Tensor]:
    """Anchor minus what a rank holds, written over that: it points like a gradient."""
    return [torch.sub(s["anchor"], x, out=x) for s, x in zip(loop.states, held)]


def return_to_anchor(loop: Loop) -> None:
    """All ranks hold the anchor again, and each a whole share of it."""
    loop.assign([s["anchor"] for s in loop.states])
    for state in loop.mixing:
        state.clear()
