"""Post-local SGD: synchronous training while it is fragile, local steps after."""

from typing import final

from gossamer.core.constraints import Constraint, excludes
from gossamer.core.loop import Loop
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule
from gossamer.core.verbs import OptimizerStep, Program
from gossamer.schedules.wrapping import Wrapping


@final
@part("post_local", sample="post_local(2, local_sgd(4))")
class PostLocal(Wrapping):
    """For `steps` steps gradients are averaged, as in synchronous training; from then on it is `then`.

    The steps are those up to the first cut of the learning rate, usually. All ranks hold one model when `then` begins, which
    is its first anchor, and an optimizer that saw equal gradients. Rounds of `then` end at multiples of its length,
    counted from the first step of training, so that the first one may be shorter. `then` may be any schedule of local steps.

    Use: where local steps from the start cost quality: models part the most while gradients change fast.

    Not for: links on which even the first steps cannot wait for every average; `local_sgd` and `slowmo` start at once.

    Wire: the exchange's bytes at every step at first, and then those of `then`.

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
            not self.then.averages_gradients and self.then.drives is None and not self.then.lane,
            f"post_local: {self.then} is no schedule of local steps; use local_sgd(...), slowmo(...) or another one",
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        units = "a residual of gradients is none of models, and would be lost or counted wrongly at the change; "
        return (
            *self.then.constraints,
            excludes(
                "memory", because="{memory} under {schedule}: " + units + "drop the memory, and use scatter(qsgd())"
            ),
            excludes("own feedback", because="{exchange} under {schedule}: " + units + "leave feedback out"),
            excludes("control", because="{controller} under {schedule} would take gradients and models for the same"),
        )

    @property
    def prelude(self) -> int:
        return max(self.steps, self.then.prelude)

    def averages(self, step: int) -> bool:
        return step <= self.steps

    def ends_round(self, step: int) -> bool:
        return self.averages(step) or self.then.ends_round(step)

    def is_synced(self, step: int) -> bool:
        return self.averages(step) or self.then.is_synced(step)

    def step(self, loop: Loop) -> Program[None]:
        if not self.averages(loop.step):
            yield from self.then.step(loop)
            return
        yield from loop.average_gradients()
        yield OptimizerStep()
