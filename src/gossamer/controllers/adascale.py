"""AdaScale: scale the learning rate of a large batch by its current gain over one rank's batch."""

from collections.abc import Iterable
from dataclasses import replace
from math import log, log1p
from typing import Any, final

import torch

from gossamer.controllers.noise import NoiseController, look, needs_a_mean_without_noise
from gossamer.core.binding import Binding
from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Facts
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require

MOST = 1024  # times the rate of one rank, whatever the number of ranks


@final
@part("adascale")
class AdaScale(NoiseController):
    """Multiply the learning rate tuned for one rank's batch by the gain r of a step with all ranks' batches.

    r = (var + sqr) / (var / S + sqr) of S ranks, with var the variance of a rank's gradient and sqr the squared norm of the true
    gradient, estimated from sum |g_i|^2 and |mean g|^2: 1 if all ranks have equal gradients, S if all is noise. The rate follows r
    when it is off by more than `slack`. A step counts as r steps: `comm.progress` is their sum; learning rate schedules must
    use it, and so must the end of training: `while comm.progress < steps`.

    Use: with SGD and a learning rate that was tuned on one rank, on any number of ranks.

    Not for: adaptive optimizers such as Adam, whose step is not proportional to the gradient; nor ranks with batches of
    different sizes.

    Wire: an all-reduce of 16 bytes per bucket at each step.

    >>> AdaScale(slack=0.1)
    adascale(slack=0.1)

    Paper: Johnson, Agrawal, Gu, Guestrin, AdaScale SGD: A User-Friendly Algorithm for Distributed Training, ICML 2020.
    """

    slack: float = 0.05

    def __post_init__(self) -> None:
        require(
            0.01 <= self.slack < 1, f"adascale: slack must lie in [0.01, 1), got {self.slack}; 0.05 follows within 5 %"
        )

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            *super().constraints,
            requires(
                "batch",
                because="{controller} sets the rate of steps that all ranks share, and {schedule} has none; use every_step()",
            ),
            needs_a_mean_without_noise("set the rate yourself"),
        )

    def fits(self, binding: Binding) -> None:
        for optimizer in binding.optimizers:
            if any("betas" in group for group in optimizer.param_groups):
                raise AttachError(
                    f"{self} with {type(optimizer).__name__}: its steps are not proportional to the gradient, so that gains "
                    "say nothing about their length; use torch.optim.SGD, or leave the controller out"
                )

    def reach(self, recipe: Any) -> Iterable[Any]:
        if "batch" in recipe.schedule.traits:
            for times in range(self._place(MOST) + 1):
                yield self._at(recipe, float(recipe.schedule.rate), times)

    def _place(self, gain: float) -> int:
        """Index of a gain in the grid of rates, which lie `slack` apart."""
        return round(log(gain) / log1p(self.slack))

    def _at(self, recipe: Any, one: float, place: int) -> Any:
        return replace(recipe, schedule=replace(recipe.schedule, rate=one * (1 + self.slack) ** place))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        noise, rate = look(facts, state), float(recipe.schedule.rate)
        # The schedule's own rate, if it has one.
        one = float(state.setdefault("one", torch.tensor(rate, dtype=torch.float64)))
        state["progress"] = torch.tensor(float(state.get("progress", 0.0)) + rate / one, dtype=torch.float64)
        gain = min(max(noise.gain, 1.0), noise.batches, MOST)
        if abs(gain * one / rate - 1) <= self.slack:
            return recipe
        return self._at(recipe, one, self._place(gain))
