"""Elastic averaging SGD: local steps, with every model pulled towards a common centre."""

from functools import cached_property
from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Shape, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.rounds import just_before_landing, remember_anchor

CENTRE = 0.9  # N alpha by default: how far the centre moves towards the mean


@final
@part("easgd", sample="easgd(8)")
class EASGD(Schedule):
    """Every `every` steps: x_i -= alpha (x_i - z);  z += alpha sum_i (x_i - z), both from the values before.

    z: the centre, equal on all ranks, and the model to evaluate. Each time it moves N alpha of the way to the mean.
    `alpha` None is 0.9 / N, as in the paper. Optimizer steps move sum x_i + z, and the pulls leave it unchanged: after equally
    many steps, the centre has moved N / (N + 1) as far as under plain averages. With momentum in the optimizer it is EAMSGD:
    torch.optim.SGD(..., momentum=0.99, nesterov=True).
    Models are pulled towards the centre before this round's move, so the sum may be in flight during the whole next round: it
    moves the centre at the end of it, with the same models as if it had been waited for. The message is z - x_i, through the
    recipe's memory and exchange. A sum that is not finite is dropped: when it is due, every rank returns to the centre.

    The consensus is the current centre. It does not include the sum in flight, so what `comm.consensus()` swaps in, and what a
    checkpoint publishes, is one round old. On one rank the model is pulled to the centre too.

    Use: on slow links, when ranks should explore on their own, with an optimizer of much momentum.

    Not for: short runs, because models stay apart and the centre follows slowly, a round behind.

    Wire: the exchange's bytes once per `every` steps, overlapped with computing.

    >>> EASGD(every=10)
    easgd(10)

    Paper: Zhang, Choromanska, LeCun, Deep Learning with Elastic Averaging SGD, NIPS 2015.
    """

    every: Annotated[int, Choice(4, 10, 16, 32)]
    alpha: float | None = None

    def __post_init__(self) -> None:
        require(self.every >= 1, f"easgd: every must be at least 1 step, got {self.every}; the paper uses 10")
        require(
            self.alpha is None or 0 < self.alpha < 1,
            f"easgd: alpha must lie strictly between 0 and 1, got {self.alpha}: 0 never synchronises, 1 discards all "
            "local progress; None is 0.9 / N",
        )

    def fits(self, binding: Binding) -> None:
        if self.alpha is not None and binding.size * self.alpha > 1:
            raise AttachError(
                f"{self} on {binding.size} ranks: N alpha is {binding.size * self.alpha:.3g}, and above 1 the centre overshoots the "
                f"mean and oscillates; use alpha={CENTRE / binding.size:.3g}, or leave it out"
            )

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every, works_alone=True, evaluates_another=True)

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, None)

    def consensus_share(self, loop: Loop) -> list[Share]:
        """Return the centre, equal on all ranks; before the first step, the model."""
        return Share.each(s.get("anchor", x) for s, x in zip(loop.states, loop.parameters()))

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        if loop.step % self.every:
            return
        lost = loop.averages.in_flight() and not (yield from self._land(loop))
        if lost:
            loop.assign([s["anchor"] for s in loop.states])
        pulled, apart = self._pull(loop)
        loop.assign(pulled)
        yield from loop.averages.launch(apart)

    def _alpha(self, size: int) -> float:
        return CENTRE / size if self.alpha is None else self.alpha

    def _pull(self, loop: Loop) -> tuple[list[Tensor], list[Tensor]]:
        """Pull the models towards the centre; returns them, and centre minus model from before."""
        pulled, apart, alpha = list[Tensor](), list[Tensor](), self._alpha(loop.ranks.size)
        for bucket, x in zip(loop.buckets, loop.parameters()):
            z = bucket.states["schedule"]["anchor"]
            apart.append(torch.sub(z, x, out=bucket.layout.buffers.like(x)))
            pulled.append(x.add_(apart[-1], alpha=alpha))
        return pulled, apart

    def _land(self, loop: Loop) -> Program[bool]:
        """Wait for the sum and move the centre; returns False, and leaves it, if the sum was not finite."""
        means, share = (yield from loop.averages.wait()), self._alpha(loop.ranks.size) * loop.ranks.size
        for state, mean in zip(loop.states, means or []):
            state["anchor"] = torch.sub(state["anchor"], mean.mul_(share), out=mean)
        return means is not None
