"""Switch to another exchange, memory and schedule after a number of steps."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Exchange, Facts, Memory
from gossamer.core.parts import part, require
from gossamer.core.schedule import Schedule
from gossamer.memories import NoMemory


@final
@part("switch_exchange", sample="switch_exchange(2, scatter(qsgd(bits=2)))")
class SwitchExchange(Controller):
    """After `steps` steps send gradients through `exchange` and `memory`, by another `schedule` if one is given.

    A memory of the same kind keeps its state. The residual of another kind is sent in full with the first average after the
    switch, once; a memory with momentum, or with decay, can only be replaced by its own kind.
    Steps that a loss scaler skips are not counted, so that an update that counts its own steps switches at the same step. Under
    rounds of local steps only their averages are counted, and the switch comes at the end of a round.

    Use: for methods with dense first steps: 1-bit Adam and 1-bit LAMB, or PowerSGD after the first thousand steps.

    Not for: switching by measurements: use accordion().

    Wire: nothing of its own; four bytes per element once, if a residual is sent.

    >>> from gossamer.codecs import QSGD
    >>> from gossamer.exchanges import Scatter
    >>> SwitchExchange(1000, Scatter(QSGD(bits=2)))
    switch_exchange(1000, scatter(qsgd(bits=2)))

    Local steps after dense first ones:

    >>> from gossamer.recipe import Recipe
    >>> Recipe.of("allreduce + switch_exchange(1000, scatter(qsgd()), schedule=local_sgd(8))")
    allreduce(fp32()) + switch_exchange(1000, scatter(qsgd()), schedule=local_sgd(8))

    Paper: none.
    """

    steps: int
    exchange: Exchange
    memory: Memory = NoMemory()
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        require(
            self.steps >= 1,
            f"switch_exchange: steps must be at least 1, got {self.steps}; to use the exchange from the start, write it in the recipe",
        )

    @property
    def hears_rate(self) -> bool:
        return False

    @property
    def moves_schedule(self) -> bool:
        return self.schedule is not None

    def reach(self, recipe: Any) -> Iterable[Any]:
        yield self._after(recipe)

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        taken = int(state.get("taken", 0)) + 1
        if taken > self.steps:
            return recipe
        state["taken"] = torch.tensor(taken)
        return self._after(recipe) if taken == self.steps else recipe

    def _after(self, recipe: Any) -> Any:
        schedule = self.schedule or recipe.schedule
        return replace(recipe, exchange=self.exchange, memory=self.memory, schedule=schedule, routes={})
