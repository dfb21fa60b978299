"""AdaComm: rounds of local steps that get shorter as the loss falls."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, isfinite, sqrt
from typing import Any, Literal, final

import torch

from gossamer.core.bucket import State
from gossamer.core.constraints import Constraint, requires
from gossamer.core.contracts import Controller, Facts
from gossamer.core.errors import GossamerError
from gossamer.core.parts import part, require


@final
@part("adacomm", sample="adacomm(6)")
class AdaComm(Controller):
    """Set rounds to ceil(sqrt((lr_0 / lr)^power (F - floor) / (F_0 - floor)) H_0) local steps, every `interval` steps or more.

    F is the loss of the rounds' last batches, averaged over ranks and over the rounds since the last decision, F_0 that of the first
    `interval`; H_0 is `every` of the recipe's schedule, and H is at most `most`. Long rounds save time while the loss is large,
    short ones keep the noise of local steps small when it is low. If a round would not get shorter although the loss did not rise
    and the learning rate did not change, H is halved. `power=3` is the theory's: a rate cut tenfold makes rounds 31 times as long.
    `lr` is the mean over all elements, where parameter groups have different rates. `floor` is a known lower bound of the loss.

    The training loop calls `comm.log(loss=loss)` in each step, best before `optimizer.step()`. Rounds end at multiples of their length, counted from
    the first step of training, so that the first one after a change may be shorter.

    Use: where the right length of rounds is unknown: begin with long rounds.

    Not for: loops that do not log the loss; nor schedules that send an average while the next round is computed.

    Wire: an all-reduce of 16 bytes per round.

    >>> AdaComm(100)
    adacomm(100)

    Paper: Wang, Joshi, Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD,
    MLSys 2019.
    """

    interval: int
    most: int = 64
    power: Literal[1, 3] = 1
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(self.interval >= 1, f"adacomm: interval must be at least 1 step, got {self.interval}")
        require(self.most >= 1, f"adacomm: most must be at least 1 step, got {self.most}; 16 to 64 are usual")

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{controller} sets the length of rounds, and {schedule} has no rounds of variable length; use "
        return (*super().constraints, requires("rounds", because=because + "local_sgd(16) or slowmo(16)"))

    @property
    def moves_schedule(self) -> bool:
        return True

    @property
    def hears_loss(self) -> bool:
        return True

    def reach(self, recipe: Any) -> Iterable[Any]:
        if "rounds" in recipe.schedule.traits:
            for every in range(1, self.most + 1):
                yield replace(recipe, schedule=replace(recipe.schedule, every=every))

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        if facts.loss is None:
            raise GossamerError(
                f"{self} needs the loss, and step {facts.step} has none; call comm.log(loss=loss) before each optimizer.step()"
            )
        if not isfinite(facts.loss):  # of a step that some rank has skipped, perhaps: it says nothing of the length
            return recipe
        losses, rounds = float(state.get("losses", 0.0)) + facts.loss, float(state.get("rounds", 0.0)) + 1
        begun = int(state.setdefault("begun", torch.tensor(0)))
        state["losses"], state["rounds"] = _number(losses), _number(rounds)
        if facts.step < begun + self.interval:
            return recipe
        state["losses"], state["rounds"], state["begun"] = _number(0.0), _number(0.0), torch.tensor(facts.step)
        return replace(
            recipe, schedule=replace(recipe.schedule, every=self._length(losses / rounds, facts.mean_lr, recipe, state))
        )

    def _length(self, loss: float, lr: float, recipe: Any, state: State) -> int:
        """Steps of the next rounds."""
        now, last = int(recipe.schedule.every), state.get("last")
        state["last"] = torch.tensor([loss, lr], dtype=torch.float64)
        if last is None:
            state["first"] = torch.tensor([loss, lr, now], dtype=torch.float64)
            return now
        first, rate, begun = state["first"].tolist()
        before, then = last.tolist()
        left = max(loss - self.floor, 0.0) / max(first - self.floor, 1e-12)
        wanted = ceil(sqrt((rate / lr if lr else 1.0) ** self.power * left) * begun - 1e-9)
        if wanted >= now and loss <= before and lr == then:
            wanted = ceil(now / 2)
        return max(1, min(wanted, self.most))


def _number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
