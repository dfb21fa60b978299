"""Accordion for the batch size: small batches in critical regimes, large ones afterwards."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, final

from gossamer.controllers.regimes import Look, critical, together, watch
from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Controller, Facts
from gossamer.core.parts import part, require

GROWS = requires(
    "batch",
    because="{controller} grows the batch of a step that averages gradients, and {schedule} has none; use every_step()",
)


@final
@part("accordion_batch", sample="accordion_batch(8, 100)")
class AccordionBatch(Controller):
    """Accumulate `factor` micro-batches per step once the gradient has left its critical regime; never go back.

    It checks as `accordion` does, but the norm of the whole gradient, since all parameters share one batch; with
    `per="parameter"` it checks every parameter, and none may be critical. When the batch grows, the learning rate grows by as
    much at the same step: `factor` times from one micro-batch. The training loop reads `comm.accumulate`, or wraps its backward
    in `comm.accumulating()`. With a single rank it checks that rank's gradients, as the optimizer gets them.

    Use: where large batches train well later but not at first.

    Not for: short runs, nor loops that do not read `comm.accumulate`.

    Wire: nothing of its own; afterwards one exchange serves `factor` times as many samples.

    >>> AccordionBatch(factor=8, epoch=100)
    accordion_batch(8, 100)

    Paper: Agarwal et al., Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification, MLSys 2021.
    """

    factor: int
    epoch: int
    interval: int = 10
    threshold: float = 0.5
    per: Literal["model", "parameter"] = "model"

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"accordion_batch: factor must be at least 1, got {self.factor}")
        require(self.epoch >= 1, f"accordion_batch: epoch must be at least 1 step, got {self.epoch}")
        require(self.interval >= 1, f"accordion_batch: interval must be at least 1 epoch, got {self.interval}")
        require(self.threshold > 0, f"accordion_batch: threshold must be positive, got {self.threshold}")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (*super().constraints, GROWS)

    @property
    def moves_schedule(self) -> bool:
        return True

    @property
    def hears_rate(self) -> bool:
        return False

    def reach(self, recipe: Any) -> Iterable[Any]:
        yield self._grown(recipe)

    def _grown(self, recipe: Any) -> Any:
        before = recipe.schedule.micro_batches
        if before >= self.factor:
            return recipe
        rate = float(recipe.schedule.rate * self.factor / before)
        return replace(recipe, schedule=replace(recipe.schedule, micro_batches=self.factor, rate=rate))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        if recipe.schedule.micro_batches >= self.factor:
            return recipe
        looks = watch(self.epoch, self.interval, facts, state)
        if looks is None or any(critical(look, self.threshold) for look in self._judged(looks)):
            return recipe
        return self._grown(recipe)

    def _judged(self, looks: Mapping[str, Look]) -> list[Look]:
        """The norms to check, without parameters that get no gradient (frozen, empty, unused)."""
        return [together(looks.values())] if self.per == "model" else [look for look in looks.values() if look.now > 0]
