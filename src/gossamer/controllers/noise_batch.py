"""A batch size that grows with the gradient noise scale."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch

from gossamer.controllers.accordion_batch import GROWS
from gossamer.controllers.noise import NoiseController, look, needs_a_mean_without_noise
from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint
from gossamer.core.contracts import Facts
from gossamer.core.parts import part, require


@final
@part("noise_batch", sample="noise_batch(4)")
class NoiseBatch(NoiseController):
    """Accumulate `factor` times as many micro-batches per step once noise exceeds signal in the mean; never go back.

    The noise scale, var / sqr of one rank's gradient, is the number of ranks' batches at which their mean has as much noise as
    signal: smaller batches waste messages, larger ones computation. Where it exceeds `hysteresis` times the current number, the
    batch grows, up to `most` micro-batches a step. The learning rate grows by `factor` too, unless `rate=False`: a batch twice
    as large reduces the noise as half the rate does, so it can replace a decay. The noise estimate is kept when the batch grows.

    Use: where no schedule of the batch size is known, in place of milestones. The training loop reads `comm.accumulate`, or wraps
    its backward in `comm.accumulating()`.

    Not for: loops that do not read `comm.accumulate`, nor compressed means, since compression adds its own noise.

    Wire: an all-reduce of 16 bytes per bucket at each step; afterwards one exchange serves `factor` times as many samples.

    >>> NoiseBatch(most=8)
    noise_batch(8)

    Paper: McCandlish, Kaplan, Amodei, An Empirical Model of Large-Batch Training, 2018; Devarakonda, Naumov, Garland, AdaBatch, 2017.
    """

    most: int
    factor: int = 2
    hysteresis: float = 1.5
    rate: bool = True
    warmup: int = 20

    def __post_init__(self) -> None:
        require(self.most >= 1, f"noise_batch: most must be at least 1 micro-batch, got {self.most}")
        require(self.factor >= 2, f"noise_batch: factor must be at least 2, got {self.factor}")
        require(
            self.hysteresis >= 1, f"noise_batch: hysteresis must be at least 1, got {self.hysteresis}; 1.5 is usual"
        )
        require(self.warmup >= 1, f"noise_batch: warmup must be at least 1 step, got {self.warmup}")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (*super().constraints, GROWS, needs_a_mean_without_noise("accordion_batch()"))

    def reach(self, recipe: Any) -> Iterable[Any]:
        if "batch" in recipe.schedule.traits:
            while (grown := self._grown(recipe)) != recipe:
                recipe = grown
                yield recipe

    def _grown(self, recipe: Any) -> Any:
        batches = recipe.schedule.micro_batches * self.factor
        if batches > self.most:
            return recipe
        rate = recipe.schedule.rate * (self.factor if self.rate else 1)
        return replace(recipe, schedule=replace(recipe.schedule, micro_batches=batches, rate=float(rate)))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        noise, seen = look(facts, state), int(state.get("seen", 0)) + 1
        state["seen"] = torch.tensor(seen)
        grown = self._grown(recipe)
        if grown == recipe or seen < self.warmup or noise.scale <= self.hysteresis * noise.batches:
            return recipe
        state["seen"] = torch.tensor(0)
        state["noise"] = state["noise"] * state["noise"].new_tensor([1 / self.factor, 1.0, 1.0])
        return grown
