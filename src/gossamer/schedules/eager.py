"""Eager updates: a rank applies its own progress at once, and that of the others a round later."""

from functools import cached_property
from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.contracts import Policy
from gossamer.core.loop import BucketView, Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.rounds import OuterStep, differences, just_before_landing, remember_anchor


@final
@part("eager", sample="eager(8)")
class Eager(Schedule):
    """Every `every` steps: an outer step from a rank's own progress now and the others' progress a round ago.

    D_i = a_i - x_i, launched;  E_i = D_i / N + D' - D_i' / N, where D' is the mean of the round before, and D_i' this rank's
    part of it;  v_i = momentum v_i + E_i;  a_i -= rate (E_i + momentum v_i);  x_i = a_i. So no rank waits: an average has a whole
    round to arrive, and only the others' part is late. `replace="scaled"` takes D_i / N + (1 - 1/N) D', as the paper prints
    it: then a part of a rank's own progress counts twice, which drives ranks apart.

    Anchors and velocities differ between ranks. Besides, every rank keeps the model that follows only the means, equal on all
    ranks: evaluate that one. If an average is not finite, all ranks return to it.

    On one rank it takes the outer steps of `diloco`, and the model to evaluate is a round behind.

    Use: across sites, when an average takes as long as a round and `diloco` would wait for it.

    Not for: machines short of memory, because it keeps six more copies of the model; few rounds, as `diloco`.

    Wire: the exchange's bytes once per `every` steps, overlapped with computing.

    >>> Eager(30)
    eager(30)

    Paper: Kale, Douillard, Donchev, Eager Updates for Overlapped Communication and Computation in DiLoCo, 2025.
    """

    every: Annotated[int, Choice(4, 8, 12, 24, 48)]
    rate: Annotated[float, LogRange(0.2, 1.0)] = 0.4
    momentum: Annotated[float, Range(0.0, 0.9)] = 0.9
    replace: Annotated[Literal["own", "scaled"], Choice("own", "scaled")] = "own"

    def __post_init__(self) -> None:
        require(self.every >= 1, f"eager: every must be at least 1 step, got {self.every}; the paper uses 30")
        require(self.rate > 0, f"eager: rate must be positive, got {self.rate}; 0 would freeze the model")
        require(0 <= self.momentum < 1, f"eager: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual")

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, works_alone=True, evaluates_another=True)

    def policy(self, key: str) -> Policy:
        return "mean" if key in ("anchor", "velocity", "own") else "equal"

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, None)

    def consensus_share(self, loop: Loop) -> list[Share] | None:
        held = zip(loop.states, loop.parameters())
        return Share.each(state.get("agreed", x) for state, x in held)

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        for state in loop.states:
            state.setdefault("agreed", state["anchor"])
        yield OptimizerStep()
        if loop.step % self.every:
            return
        in_flight = loop.averages.in_flight()
        means = (yield from loop.averages.wait()) if in_flight else None
        if in_flight and means is None:
            return self._return(loop)
        own = differences(loop, loop.parameters())
        copies = [bucket.layout.buffers.like(d).copy_(d) for bucket, d in zip(loop.buckets, own)]
        for i, (bucket, mine, lr) in enumerate(zip(loop.buckets, own, loop.optimizer.lrs)):
            self._take(bucket, mine, None if means is None else means[i], loop.ranks.size, lr)
        loop.assign([s["anchor"] for s in loop.states])
        yield from loop.averages.launch(copies)

    def _take(self, bucket: BucketView, mine: Tensor, mean: Tensor | None, size: int, lr: float) -> None:
        """Take the outer step of a bucket, on this rank's own anchor and on the agreed one."""
        state, outer = bucket.states["schedule"], OuterStep(self.momentum, self.rate, by_lr=False, nesterov=True)
        eager = torch.div(mine, size, out=bucket.layout.buffers.like(mine))
        if mean is not None:
            if self.replace == "own":
                eager.add_(mean).sub_(state["own"], alpha=1 / size)
            else:
                eager.add_(mean, alpha=1 - 1 / size)
            agreed = {"anchor": state["agreed"]} | ({"velocity": state["pace"]} if "pace" in state else {})
            outer.follow(agreed, bucket.layout, mean, lr)
            state["agreed"] = agreed["anchor"]
            if self.momentum:
                state["pace"] = agreed["velocity"]
        state["own"] = mine
        outer.take(bucket, eager, lr)

    def _return(self, loop: Loop) -> None:
        """Reset the anchor and its velocity to the agreed model, and write that to the parameters."""
        for state in loop.states:
            state["anchor"] = state["agreed"]
            for key in "own", "velocity":
                state.pop(key, None)
            if "pace" in state:
                state["velocity"] = state["pace"]
        loop.assign([s["anchor"] for s in loop.states])
