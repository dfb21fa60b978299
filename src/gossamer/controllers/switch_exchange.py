"""From a step on: another exchange, and the memory that it needs."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch

from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Exchange, Facts, Memory
from gossamer.core.parts import part, require
from gossamer.memories import NoMemory


@final
@part("switch_exchange", sample="switch_exchange(2, scatter(qsgd(bits=2)))")
class SwitchExchange(Controller):
    """After so many steps that were taken, gradients go another way: through `exchange` and `memory`.

    What is kept stays: a memory begins with nothing owed, and where the model is cut into the same buckets nothing is built anew.
    Steps that a loss scaler skips are not counted, so that the change falls together with that of an update that counts its own.

    Use: for methods that begin densely: 1-bit Adam and 1-bit LAMB, or PowerSGD after the first thousand steps.

    Not for: deciding when to compress by what is seen: accordion() does.

    Wire: nothing of its own.

    >>> from gossamer.codecs import QSGD
    >>> from gossamer.exchanges import Scatter
    >>> SwitchExchange(1000, Scatter(QSGD(bits=2)))
    switch_exchange(1000, scatter(qsgd(bits=2)))

    Paper: none.
    """

    steps: int
    exchange: Exchange
    memory: Memory = NoMemory()

    def __post_init__(self) -> None:
        require(
            self.steps >= 1,
            f"switch_exchange: steps must be at least 1, got {self.steps}; else say the exchange in the recipe",
        )
        require(
            isinstance(self.exchange, Exchange),  # pyright: ignore[reportUnnecessaryIsInstance]
            f"switch_exchange: {self.exchange} acts on the whole step; it can be a recipe's exchange, not a controller's",
        )

    def reach(self, recipe: Any) -> Iterable[Any]:
        yield self._after(recipe)

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        taken = int(state.get("taken", 0)) + 1
        if taken > self.steps:
            return recipe
        state["taken"] = torch.tensor(taken)
        return self._after(recipe) if taken == self.steps else recipe

    def _after(self, recipe: Any) -> Any:
        return replace(recipe, exchange=self.exchange, memory=self.memory, routes={})
