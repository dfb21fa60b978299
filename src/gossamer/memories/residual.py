"""What memories share that keep a residual: they owe it, can take over another's, and may follow the learning rate."""

from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Memory, Sender, Unit
from gossamer.core.verbs import Program


class ResidualUnits(NamedTuple):
    """What a residual is measured in: today, and when it was left, at another learning rate perhaps."""

    now: float
    before: float

    @property
    def rescale(self) -> float:
        return self.now / self.before


class ResidualMemory(Memory):
    """A memory whose entry "residual" is what did not get through yet, in units of its entry "unit", if there is one.

    If it `follows_rate`, what was held back under a large learning rate weighs as much when it is sent under a small one.
    """

    def residual(self, state: State) -> tuple[Tensor, float] | None:
        return (state["residual"], float(state.get("unit", 1.0))) if "residual" in state else None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        if "residual" in state:
            state["residual"] = torch.add(state["residual"], owed, alpha=times)
        return "residual" in state

    def unit(self, key: str) -> Unit:
        return "none" if key == "unit" else "gradient"

    def rests(self, context: Context) -> bool:
        """True at a step of length zero, which neither pays debts nor makes any."""
        return self.follows_rate and context.lr == 0

    def pass_by(self, block: Bucket, send: Sender, context: Context) -> Program[Tensor]:
        """Send as if nothing were owed, and owe nothing for it."""
        result = yield from send(block, context._replace(feedback=0.0))
        return result.mean

    def units_of(self, state: State, context: Context) -> ResidualUnits:
        """Those of this step, which the state keeps from now on, and those of what it owes."""
        now = 1.0 / context.lr if self.follows_rate else 1.0
        before = float(state.get("unit", now))
        if self.follows_rate:
            state["unit"] = torch.tensor(now, dtype=torch.float64)
        return ResidualUnits(now, before)
