"""GradScalers: what they must be told, and how one that attach was not told of is found."""

import sys
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossamer.core.contracts import Quorum
from gossamer.core.errors import AttachError
from gossamer.recipe import Recipe


def refuse_under_backups(recipe: Recipe, scaler: Any) -> None:
    if scaler is not None and isinstance(recipe.exchange, Quorum):
        raise AttachError(
            f"{recipe.exchange} with a GradScaler: a late rank would apply missed updates under another scale; use bf16"
        )


def refuse_untold(recipe: Recipe, optimizer: Optimizer) -> None:
    """To be called inside of `optimizer.step()`: is it a scaler that calls it, where that would go wrong in silence?

    A scaler skips steps on its own, and asks nobody. Under local steps that rank would fall behind the others, and wait
    for them in the end. Where gradients are averaged all scalers see the same, and the next backward shows what was skipped.
    """
    if recipe.schedule.averages_gradients and not isinstance(recipe.exchange, Quorum):
        return
    scaler = _calling_scaler()
    if scaler is None:
        return
    refuse_under_backups(recipe, scaler)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):  # else step() is called always, and skips inside
        raise AttachError(
            f"a GradScaler calls optimizer.step(), and attach does not know of it: under {recipe.schedule} a rank whose "
            "scaler skips a step would fall behind the others; say attach(..., scaler=scaler)"
        )


def _calling_scaler() -> GradScaler | None:
    """The scaler whose step() is under way, if it is in use."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            scaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None
