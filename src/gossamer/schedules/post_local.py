"""Post-local SGD: synchronous training at first, local steps later."""

from dataclasses import replace
from functools import cached_property
from typing import final

from torch import Tensor

from gossamer.core.constraints import Constraint, excludes
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule, Shape
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.wrapping import Wrapping


@final
@part("post_local", sample="post_local(2, local_sgd(4))")
class PostLocal(Wrapping):
    """Averages gradients at every step for the first `steps` steps, then continues with the schedule `then`.

    `steps` is usually the step of the first learning rate cut. When `then` begins, all ranks have equal models, which are
    its first anchor, and equal optimizer states. Rounds of `then` end at multiples of its length,
    counted from the first step of training, so the first one may be shorter. `then` may be any schedule of local steps.

    Use: when local steps from the start cost quality: models diverge most while gradients change fast.

    Not for: links that are too slow for an average at every step, even at first (use `local_sgd` or `slowmo`).

    Wire: the exchange's bytes at every step at first, then the bytes of `then`.

    >>> from gossamer.schedules import LocalSGD
    >>> PostLocal(1000, LocalSGD(8))
    post_local(1000, local_sgd(8))

    Paper: Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020.
    """

    steps: int
    then: Schedule

    def __post_init__(self) -> None:
        require(self.steps >= 0, f"post_local: steps must be 0 or more, got {self.steps}")
        require(
            not self.then.shape.averages_gradients and self.then.shape.mixer is None and not self.then.shape.lane,
            f"post_local: {self.then} is no schedule of local steps; use local_sgd(...), slowmo(...) or another one",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        units = "a residual of gradients cannot be used for models, and would be lost or wrong at the change; "
        return (
            *self.then.constraints,
            excludes(
                "memory", because="{memory} under {schedule}: " + units + "drop the memory, and use scatter(qsgd())"
            ),
            excludes("own feedback", because="{exchange} under {schedule}: " + units + "leave feedback out"),
            excludes("control", because="{controller} under {schedule} would compare gradients with models; drop it"),
        )

    @cached_property
    def shape(self) -> Shape:
        return replace(super().shape, prelude=max(self.steps, self.then.shape.prelude))

    def averages(self, step: int) -> bool:
        return step <= self.steps or self.then.averages(step)

    def ends_round(self, step: int) -> bool:
        return self.averages(step) or self.then.ends_round(step)

    def is_synced(self, step: int) -> bool:
        return self.averages(step) or self.then.is_synced(step)

    def ready(self, loop: Loop, index: int, flat: Tensor) -> Program[None]:
        if loop.step > self.steps:
            yield from self.then.ready(loop, index, flat)
            return
        yield from loop.averages.send(index, flat)

    def step(self, loop: Loop) -> Program[None]:
        if loop.step > self.steps:
            yield from self.then.step(loop)
            return
        yield from loop.averages.wait_gradients()
        yield OptimizerStep()
