"""Accordion: strong compression only outside critical regimes of training."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, final

import torch

from gossamer.controllers.regimes import critical, slowed, watch
from gossamer.core.bucket import State
from gossamer.core.contracts import Controller, Exchange, Facts
from gossamer.core.parts import part, require


@final
@part("accordion", sample="accordion(scatter(qsgd(bits=8)), scatter(qsgd(bits=2)), 100)")
class Accordion(Controller):
    """Use the mild exchange for parameters in a critical regime, the harsh one for all others.

    Over every `interval`-th epoch of `epoch` steps the averaged gradients are summed to D. A parameter is critical if
    | |D_old| - |D_now| | >= threshold |D_old|. All start mild; a learning rate that falls by the factor `drop` in one step makes
    its parameters mild until the next check. Memories and warm starts are kept on a switch. The controller uses the decoded
    means, which are the same on every rank, so the decision needs no traffic and is the same everywhere. `comm.recipe` shows it:
    `route(names, harsh)`.

    Use: where the right strength of compression is unknown.

    Not for: short runs: the first decision comes after `interval` + 1 epochs.

    Wire: nothing of its own.

    >>> from gossamer.codecs import PowerSGD
    >>> from gossamer.exchanges import AllReduced
    >>> Accordion(AllReduced(PowerSGD(rank=8)), AllReduced(PowerSGD(rank=1)), 100)
    accordion(allreduce(powersgd(rank=8)), allreduce(powersgd(rank=1)), 100)

    Paper: Agarwal et al., Accordion: Adaptive Gradient Communication via Critical Learning Regime Identification, MLSys 2021.
    """

    mild: Exchange
    harsh: Exchange
    epoch: int
    interval: int = 10
    threshold: float = 0.5
    drop: float = 2.0

    def __post_init__(self) -> None:
        require(self.epoch >= 1, f"accordion: epoch must be at least 1 step, got {self.epoch}")
        require(self.interval >= 1, f"accordion: interval must be at least 1 epoch, got {self.interval}")
        require(self.threshold > 0, f"accordion: threshold must be positive, got {self.threshold}; the paper uses 0.5")
        require(self.drop > 1, f"accordion: drop must be above 1, got {self.drop}; 2 means 'halved or less'")

    def reach(self, recipe: Any) -> Iterable[Any]:
        require(
            recipe.exchange == self.mild,
            f"{self} starts with its mild exchange; write '{self.mild} + ...' instead of '{recipe.exchange} + ...'",
        )
        yield replace(recipe, exchange=self.harsh)

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        looks = watch(self.epoch, self.interval, facts, state)
        verdict = None if looks is None else {name: critical(look, self.threshold) for name, look in looks.items()}
        if mild := slowed(facts, state, self.drop):
            judged = {_name(k) for k in state if k.startswith("mild:")} | set(verdict or {})
            verdict = (verdict or {}) | dict.fromkeys(sorted(judged & mild), True)
        if verdict is None and recipe.exchange == self.mild:
            return recipe
        return self._route(recipe, state, verdict or {})

    def _route(self, recipe: Any, state: State, verdict: dict[str, bool]) -> Any:
        for name, mild in verdict.items():
            state[f"mild:{name}"] = torch.tensor(mild)
        harsh = [_name(k) for k, mild in state.items() if k.startswith("mild:") and not mild]
        return recipe.route(self.mild, self.harsh, sorted(harsh))


def _name(key: str) -> str:
    return key.removeprefix("mild:")
