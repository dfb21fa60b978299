"""DES-LOC: local steps of Adam; models are averaged often, its moments more rarely."""

from functools import cached_property
from math import lcm
from typing import Annotated, final

from gossamer.core.binding import MOMENTS, Binding, buffers_after_a_step
from gossamer.core.errors import AttachError
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import Program
from gossamer.schedules.local_sgd import LocalSGD


@final
@part("des_loc", sample="des_loc(8)")
class DESLOC(Schedule):
    """Takes `every` local steps, then averages models; first moments every `first` rounds, second ones every `second`.

    After the last step of a round x_i = mean_j x_j;  in every `first`-th round m_i = mean_j m_j;  in every `second`-th
    v_i = mean_j v_j. An average of 0 rounds is never taken. Moments change slowly, v slower than m, so they need not meet as
    often as models. `first=1, second=1` is Local Adam, which is `slowmo(every, beta=0.0, buffers="average")`, and
    `first=0, second=0` is `local_sgd(every)`, both bit for bit. The paper averages models before a step and not after it, and
    counts all three intervals in steps.

    m is `exp_avg` of the Adam family, and the momentum of SGD; v is `exp_avg_sq`. Other optimizers are refused, since what
    they keep is neither. Counters and a maximum (amsgrad) stay each rank's own. Moments are averaged exactly, past codec and
    memory: an error could make v negative.

    Equal data on all ranks give the steps of one rank. `des_loc(1, 1, 1)` is not Adam on averaged gradients: the mean of
    squares is more than the square of the mean.

    Use: local steps of Adam, where a rank's own moments drift and `slowmo(8, buffers="average")` sends three models a round.

    Not for: plain SGD, which keeps no moments, so that it is `local_sgd`.

    Wire: the exchange's bytes once per `every` steps; in every `first`-th and every `second`-th round 4 d bytes in an
    all-reduce, and 16 in another. By default 1.5 models a round.

    >>> DESLOC(8)
    des_loc(8)
    >>> DESLOC(8, first=1, second=0)
    des_loc(8, first=1, second=0)

    Paper: Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models,
    arXiv 2505.22549, 2025.
    """

    every: Annotated[int, Choice(2, 4, 8, 12, 24)]
    first: Annotated[int, Choice(1, 3)] = 3
    second: Annotated[int, Choice(1, 3, 6)] = 6

    def __post_init__(self) -> None:
        require(self.every >= 1, f"des_loc: every must be at least 1 step, got {self.every}; 8 to 64 are usual")
        require(
            self.first >= 0 and self.second >= 0,
            f"des_loc: first and second count rounds, so they must be 0 (never) or more, got {self.first} and {self.second}",
        )

    @cached_property
    def shape(self) -> Shape:
        return Shape(period=self.every * lcm(self.first or 1, self.second or 1), syncs=True)

    def ends_round(self, step: int) -> bool:
        return step % self.every == 0

    def fits(self, binding: Binding) -> None:
        super().fits(binding)
        for optimizer in binding.optimizers:
            for group in optimizer.param_groups:
                try:
                    others = buffers_after_a_step(optimizer, group) - MOMENTS.keys() - {"max_exp_avg_sq"}
                except TypeError:  # made from more than parameter groups: its settings tell what it keeps
                    others = frozenset[str]() if {"betas", "momentum"} & group.keys() else {"what is not known"}
                if others:
                    raise AttachError(
                        f"{self} with {type(optimizer).__name__}, which keeps {', '.join(sorted(others))}: only exp_avg and exp_avg_sq "
                        "of Adam and the momentum of SGD are averaged; use torch.optim.AdamW, or slowmo(buffers='average')"
                    )

    def step(self, loop: Loop) -> Program[None]:
        yield from LocalSGD(self.every).step(loop)
        due = self._due(loop.step)
        if due and loop.ranks.size > 1:
            yield from loop.optimizer.average(due)

    def _due(self, step: int) -> list[int]:
        """The moments that are averaged after this step: 1, 2 or both."""
        round, rest = divmod(step, self.every)
        intervals = {1: self.first, 2: self.second}
        return [moment for moment, often in intervals.items() if not rest and often and round % often == 0]
