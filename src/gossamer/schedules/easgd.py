"""Elastic averaging: ranks explore, and a spring ties them to a centre."""

from typing import Annotated, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Share
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.rounds import just_before_landing, remember_anchor

CENTRE = 0.9  # N alpha, unless alpha is given: how far the centre moves towards the mean


@final
@part("easgd", sample="easgd(8)")
class EASGD(Schedule):
    """Every `every` steps: x_i -= alpha (x_i - z);  z += alpha sum_i (x_i - z), both of them as they were before.

    z: the centre, equal on all ranks, and the model that is judged; N alpha of the way to the mean it moves each time.
    `alpha` None is 0.9 / N, which the paper takes. Steps move sum x_i + z, and springs leave it as it is: with as many
    steps, the centre has moved N / (N + 1) as far as under plain averages. With momentum in the optimizer it is EAMSGD:
    torch.optim.SGD(..., momentum=0.99, nesterov=True).
    The springs of a round pull to where the centre was, so the sum may travel during the whole next round: it moves the
    centre at its end, and no model is another than if it had been waited for. What is sent is z - x_i, through the recipe's
    memory and exchange. A round whose sum is not finite is dropped: when it should land, every rank returns to the centre.

    Use: on slow links with ranks that should explore for themselves, and an optimizer of much momentum.

    Not for: short runs: ranks stay apart, and the centre follows slowly, a round behind.

    Wire: the exchange's bytes once per `every` steps, hidden behind computing.

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
            f"easgd: alpha must lie strictly between 0 and 1, got {self.alpha}: with 0 ranks never meet, with 1 they forget "
            "what they learned; None is 0.9 / N",
        )

    def fits(self, binding: Binding) -> None:
        if self.alpha is not None and binding.size * self.alpha > 1:
            raise AttachError(
                f"{self} on {binding.size} ranks: N alpha is {binding.size * self.alpha:.3g}, and above 1 the centre overshoots the "
                f"mean and swings; use alpha={CENTRE / binding.size:.3g}, or leave it out"
            )

    @property
    def period(self) -> int:
        return self.every

    def ends_round(self, step: int) -> bool:
        return just_before_landing(step, self.every, None)

    def consensus_share(self, loop: Loop) -> list[Share]:
        """The centre is what ranks agree on; before the first step it is the model."""
        centres = [s.get("anchor", x) for s, x in zip(loop.states, loop.parameters())]
        return [Share(z, torch.ones(())) for z in centres]

    def step(self, loop: Loop) -> Program[None]:
        remember_anchor(loop, loop.parameters)
        yield OptimizerStep()
        if loop.step % self.every:
            return
        lost = loop.in_flight() and not (yield from self._land(loop))
        if lost:
            loop.assign([s["anchor"] for s in loop.states])
        pulled, apart = self._pull(loop)
        loop.assign(pulled)
        yield from loop.launch(apart)

    def _alpha(self, size: int) -> float:
        return CENTRE / size if self.alpha is None else self.alpha

    def _pull(self, loop: Loop) -> tuple[list[Tensor], list[Tensor]]:
        """Models, tied to the centre; and how far from it each of them was."""
        pulled, apart, alpha = list[Tensor](), list[Tensor](), self._alpha(loop.size)
        for place, x in zip(loop.places, loop.parameters()):
            z = place.states["schedule"]["anchor"]
            apart.append(torch.sub(z, x, out=place.layout.buffers.like(x)))
            pulled.append(x.add_(apart[-1], alpha=alpha))
        return pulled, apart

    def _land(self, loop: Loop) -> Program[bool]:
        """Move the centre; False if the sum was not finite, and it stays."""
        means, share = (yield from loop.land()), self._alpha(loop.size) * loop.size
        for state, mean in zip(loop.states, means or []):
            state["anchor"] = torch.sub(state["anchor"], mean.mul_(share), out=mean)
        return means is not None
