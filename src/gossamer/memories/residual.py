"""Shared code of memories with a residual: they can take over another memory's residual, and may follow the learning rate."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import ARREARS, Context, Memory, Sender, Unit
from gossamer.core.verbs import Program


class ResidualUnits(NamedTuple):
    """Units of a residual: now, and at the step at which it was stored (the learning rate may differ)."""

    now: float
    before: float

    @property
    def rescale(self) -> float:
        return self.now / self.before


class ResidualMemory(Memory):
    """A memory with a state entry "residual": what has not been sent yet, in units of the entry "unit", if there is one.

    With `follows_rate` an element held back under a large learning rate keeps that weight when it is sent under a small one.
    """

    owes: ClassVar[bool] = True

    def succeed(self, before: Memory, state: State) -> State:
        """State that takes over the residual of the memory before."""
        if not isinstance(before, ResidualMemory):
            return super().succeed(before, state)
        alike = type(before) is type(self)
        kept = {key: tensor for key, tensor in state.items() if alike or key in ("residual", "unit", ARREARS)}
        if not (self.follows_rate and before.follows_rate):
            kept.pop("unit", None)  # both units are those of the last step
        return kept

    def residual(self, state: State) -> tuple[Tensor, float] | None:
        return (state["residual"], float(state.get("unit", 1.0))) if "residual" in state else None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        if "residual" in state:
            state["residual"] = torch.add(state["residual"], owed, alpha=times)
        return "residual" in state

    def take_on(self, state: State, owed: State, times: float) -> None:
        """A rank that has just come has no residual yet: then the other's is its first."""
        if "residual" not in owed:
            return
        unit = float(state.setdefault("unit", torch.ones((), dtype=torch.float64))) if self.follows_rate else 1.0
        if not self.inherit(state, owed["residual"], times * unit):
            state["residual"] = owed["residual"] * (times * unit)

    def let_go(self, state: State) -> None:
        for key in ("residual", "unit"):
            state.pop(key, None)

    def unit(self, key: str) -> Unit:
        return "none" if key == "unit" else "gradient"

    def rests(self, context: Context) -> bool:
        """True at a step with learning rate 0, which leaves the residual as it is."""
        return self.follows_rate and context.lr == 0

    def pass_by(self, block: Bucket, send: Sender, context: Context) -> Program[Tensor]:
        """Send without the residual, and do not change it."""
        result = yield from send(block, context._replace(feedback=0.0))
        return result.mean

    def units_of(self, state: State, context: Context) -> ResidualUnits:
        """Units of this step, which the state stores, and units of the stored residual."""
        now = 1.0 / context.lr if self.follows_rate else 1.0
        before = float(state.get("unit", now))
        if self.follows_rate:
            state["unit"] = torch.tensor(now, dtype=torch.float64)
        return ResidualUnits(now, before)
