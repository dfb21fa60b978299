"""GradScalers: what they must be told, how a step that one leaves out is heard, what their scale is, and how an untold one is found."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gossamer.core.stream_events import StreamMark
from gossamer.core.torch_private import private_name
from gossamer.integrations.requirements import SCALED, UNTOLD_LOCAL, UNTOLD_MEANS, UNTOLD_MOMENTUM, refuse
from gossamer.recipe import Recipe

_step_code: Any = private_name(
    private_name(GradScaler, "step", "finds a scaler it was not told of"), "__code__", "finds such a scaler"
)


class ScalerHook:
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


class KnownScale:
    """A scaler's factor, known to the host without waiting for the forward pass.

    A GPU keeps it, and whoever asks for it in the midst of backward waits for all that was launched before. So a copy sets
    out as soon as `scaler.update()` has changed it.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self._below = scaler, scaler.update
        self._copy: tuple[Tensor, StreamMark] | None = None
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
            self._copy, self._of = (copy, StreamMark(held.device)), (id(held), held._version)

    def _held(self) -> Tensor | None:
        return getattr(self._scaler, "_scale", None)


def refuse_untold(recipe: Recipe, optimizer: Optimizer) -> None:
    """To be called inside of `optimizer.step()`: is it a scaler that calls it, where that would go wrong in silence?

    A scaler skips steps on its own, and asks nobody. Under local steps that rank would fall behind the others, and wait
    for them in the end. Where gradients are averaged all scalers see the same, and the next backward shows what was
    skipped; but what a memory keeps would come back under another scale.
    """
    if not _is_called_by_scaler():
        return
    refuse(recipe, *SCALED)
    if recipe.schedule.averages_gradients:
        refuse(recipe, *UNTOLD_MEANS, *UNTOLD_MOMENTUM)
    elif not _skips_inside(optimizer):  # else step() is called always, and skips inside
        refuse(recipe, *UNTOLD_LOCAL)


def _skips_inside(optimizer: Optimizer) -> bool:
    """Whether a scaler calls its step() always, and it skips what is not finite itself, as fused optimizers do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _is_called_by_scaler() -> bool:
    """Is the step() of a scaler under way that is in use? Nothing but the stack tells (torch 2.6 to 2.13).

    A scaler calls `optimizer.step()` with no arguments of its own, so that the optimizer's hooks see none; it has no hooks
    itself, and keeps what it found (`_found_inf_per_device`) where only who holds the scaler can ask. It writes `grad_scale`
    and `found_inf` on fused optimizers alone.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _step_code:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
