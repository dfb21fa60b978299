"""Accordion over the batch: small batches while training is fragile, large ones after."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

from gossamer.controllers.regimes import EpochMonitor
from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Controller, Facts
from gossamer.core.parts import part, require


@final
@part("accordion_batch", sample="accordion_batch(8, 100)")
class AccordionBatch(Controller):
    """Accumulate `factor` micro-batches per step once no parameter is in a critical regime; never go back.

    Checks as `accordion` does. When it grows the batch it multiplies the learning rate by `factor` as well, at the same step.
    The training loop reads `comm.accumulate`, or wraps its backward in `comm.accumulating()`. A rank alone judges its own
    gradients, as the optimizer finds them.

    Use: where large batches train well later on but not at first.

    Not for: short runs, nor loops that do not ask `comm.accumulate`.

    Wire: nothing of its own; afterwards one exchange serves `factor` times as many samples.

    >>> AccordionBatch(factor=8, epoch=100)
    accordion_batch(8, 100)

    Paper: Agarwal et al., Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification, MLSys 2021.
    """

    factor: int
    epoch: int
    interval: int = 10
    threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self.factor >= 1, f"accordion_batch: factor must be at least 1, got {self.factor}")
        require(self.epoch >= 1, f"accordion_batch: epoch must be at least 1 step, got {self.epoch}")
        require(self.interval >= 1, f"accordion_batch: interval must be at least 1 epoch, got {self.interval}")
        require(self.threshold > 0, f"accordion_batch: threshold must be positive, got {self.threshold}")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            *super().constraints,
            requires(
                "batch",
                because="{controller} grows the batch of a step that averages gradients, and {schedule} has none; use "
                "every_step()",
            ),
        )

    @property
    def moves_schedule(self) -> bool:
        return True

    def reach(self, recipe: Any) -> Iterable[Any]:
        yield self._grown(recipe)

    def _grown(self, recipe: Any) -> Any:
        return replace(recipe, schedule=replace(recipe.schedule, micro_batches=self.factor, rate=float(self.factor)))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        if recipe.schedule.accumulate > 1 or self.factor == 1:
            return recipe
        verdict = EpochMonitor(self.epoch, self.interval, self.threshold).watch(facts, state)
        if verdict is None or any(critical and _moves(name, state) for name, critical in verdict.items()):
            return recipe
        return self._grown(recipe)


def _moves(name: str, state: State) -> bool:
    """A parameter that gets no gradient (frozen, empty, unused) must not hold back the whole batch."""
    return float(state[f"old:{name}"]) > 0
