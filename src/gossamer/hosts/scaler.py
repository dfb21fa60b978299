"""GradScalers: what they must be told, how a step that one leaves out is heard, what their scale is, and how an untold one is found."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.core.moments import Moment
from gossamer.memories import NoMemory
from gossamer.recipe import Recipe


class Ear:
    """Hears of every `scaler.step(optimizer)`; if the optimizer's number of `turns` is as before, the scaler left it out."""

    def __init__(self, scaler: Any, turns: Mapping[Optimizer, int], left_out: Callable[[Optimizer], None]) -> None:
        self._scaler, self._below, self._hears = scaler, scaler.step, True

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = turns[optimizer]
            result = self._below(optimizer, *args, **kwargs)
            if self._hears and turns[optimizer] == before:
                left_out(optimizer)
            return result

        self._step = scaler.step = step

    def remove(self) -> None:
        self._hears = False
        if self._scaler.__dict__.get("step") is self._step:  # else another listens on top of it
            self._scaler.step = self._below


class Scale:
    """A scaler's factor, known to the host without waiting for the forward pass.

    A GPU keeps it, and whoever asks for it in the midst of backward waits for all that was launched before. So a copy sets
    out as soon as `scaler.update()` has changed it.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self._below = scaler, scaler.update
        self._copy: tuple[Tensor, Moment] | None = None
        self._of = (0, 0)  # what it is a copy of, and how often that had been written to

        def update(*args: Any, **kwargs: Any) -> None:
            self._below(*args, **kwargs)
            self._send()

        self._update = scaler.update = update

    def now(self) -> float:
        held = self._held()
        if self._copy is None or held is None or (id(held), held._version) != self._of:
            return float(self._scaler.get_scale())
        copy, there = self._copy
        there.wait()
        return float(copy)

    def remove(self) -> None:
        if self._scaler.__dict__.get("update") is self._update:  # else another listens on top of it
            self._scaler.update = self._below

    def _send(self) -> None:
        held = self._held()
        if held is not None and held.is_cuda:
            copy = torch.zeros(held.shape, dtype=held.dtype).pin_memory().copy_(held, non_blocking=True)
            self._copy, self._of = (copy, Moment(held.device)), (id(held), held._version)

    def _held(self) -> Tensor | None:
        return getattr(self._scaler, "_scale", None)


def refuse_under_backups(recipe: Recipe, scaler: Any) -> None:
    if scaler is not None and "waits for few" in recipe.schedule.traits:
        raise AttachError(
            f"{recipe.schedule} with a GradScaler: a late rank would apply missed updates under another scale; use bf16"
        )


def refuse_untold(recipe: Recipe, optimizer: Optimizer) -> None:
    """To be called inside of `optimizer.step()`: is it a scaler that calls it, where that would go wrong in silence?

    A scaler skips steps on its own, and asks nobody. Under local steps that rank would fall behind the others, and wait
    for them in the end. Where gradients are averaged all scalers see the same, and the next backward shows what was
    skipped; but what a memory keeps would come back under another scale.
    """
    scaler = _calling_scaler()
    if scaler is None:
        return
    refuse_under_backups(recipe, scaler)
    if recipe.schedule.averages_gradients:
        if any(not isinstance(m, NoMemory) for m in (recipe.memory, *(rule.memory for rule in recipe.rules))):
            raise AttachError(
                f"a GradScaler calls optimizer.step(), and attach does not know of it: {recipe.memory} would keep gradients "
                "of one loss scale and send them under another; say attach(..., scaler=scaler)"
            )
        return
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
