"""What memories share that keep a residual: they owe it, and can take over another's."""

import torch
from torch import Tensor

from gossamer.core.block import State
from gossamer.core.contracts import Memory, Unit


class Owing(Memory):
    """A memory whose entry "residual" is what did not get through yet, in units of its entry "unit", if there is one."""

    def debt(self, state: State) -> tuple[Tensor, float] | None:
        return (state["residual"], float(state.get("unit", 1.0))) if "residual" in state else None

    def inherit(self, state: State, owed: Tensor, times: float) -> bool:
        if "residual" in state:
            state["residual"] = torch.add(state["residual"], owed, alpha=times)
        return "residual" in state

    def unit(self, key: str) -> Unit:
        return "none" if key == "unit" else "gradient"
