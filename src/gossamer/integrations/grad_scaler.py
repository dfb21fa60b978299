"""GradScalers: detect skipped steps, read the loss scale, and refuse a scaler that was not passed to `attach`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.core.stream_events import StreamMark
from gossamer.integrations.checks.introspection import is_called_by_scaler
from gossamer.integrations.checks.requirements import SCALED, UNTOLD, UNTOLD_LOCAL, UNTOLD_MEANS, refuse
from gossamer.recipe import Recipe


class ScalerHook:
    """Wraps `scaler.step`: if the optimizer's count in `turns` does not change, the scaler skipped the step."""

    def __init__(self, scaler: Any, turns: Mapping[Optimizer, int], left_out: Callable[[Optimizer], None]) -> None:
        self._scaler, self._below, self._hears = scaler, scaler.step, True
        self._turns, self._left_out = turns, left_out
        scaler.step = self

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = self._turns[optimizer]
        result = self._below(optimizer, *args, **kwargs)
        if self._hears and self._turns[optimizer] == before:
            self._left_out(optimizer)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the scaler, or one read from a file, has its own `step` in its place."""
        return getattr, (self._scaler, "step")

    def remove(self) -> None:
        self._hears = False
        if self._scaler.__dict__.get("step") is self:  # else another listens on top of it
            self._scaler.step = self._below


class KnownScale:
    """Keeps a copy of a scaler's loss scale on the host, so that reading it does not wait for the forward pass.

    The scale is on the GPU; reading it during backward would wait for all kernels launched before. So an asynchronous copy
    starts as soon as `scaler.update()` has changed it.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler, self._below = scaler, scaler.update
        self._copy: tuple[Tensor, StreamMark] | None = None
        self._of = (0, 0)  # id and version of the tensor that was copied
        scaler.update = self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._below(*args, **kwargs)
        self._send()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, "update")  # of a copy

    def now(self) -> float:
        """Return the current loss scale."""
        held = self._held()
        if self._copy is None or held is None or (id(held), held._version) != self._of:
            return float(self._scaler.get_scale())
        copy, there = self._copy
        there.wait()
        return float(copy)

    def remove(self) -> None:
        if self._scaler.__dict__.get("update") is self:  # else another listens on top of it
            self._scaler.update = self._below

    def _send(self) -> None:
        held = self._held()
        if held is not None and held.is_cuda:
            copy = torch.zeros(held.shape, dtype=held.dtype, device="cpu").pin_memory().copy_(held, non_blocking=True)
            self._copy, self._of = (copy, StreamMark(held.device)), (id(held), held._version)

    def _held(self) -> Tensor | None:
        return getattr(self._scaler, "_scale", None)


def refuse_scaled(recipe: Recipe, optimizer: Optimizer) -> None:
    """Refuse an `optimizer.step()` that would divide the direction of the recipe's update by the loss scale.

    A scaler leaves the gradients of a fused optimizer scaled and hands it the scale, unless they were unscaled before.
    """
    if recipe.update is not None and getattr(optimizer, "grad_scale", None) is not None:
        raise AttachError(
            f"{type(optimizer).__name__}(fused=True) under {recipe.update} with a GradScaler: it divides what it is given by the loss "
            "scale, but the update gives it a direction, which has none, and nothing would move; call scaler.unscale_(optimizer) before "
            "scaler.step(optimizer), or leave fused out"
        )


def unscale_others(scaler: Any, optimizers: Sequence[Optimizer], stepping: Optimizer) -> None:
    """Unscale what other optimizers hold before an update replaces it too: its directions have no scale to divide by."""
    for optimizer in optimizers:
        if optimizer is not stepping:
            with suppress(RuntimeError):  # it was unscaled already
                scaler.unscale_(optimizer)


def refuse_untold(recipe: Recipe, optimizer: Optimizer) -> None:
    """Refuse an `optimizer.step()` that a GradScaler calls, if that would give wrong results silently.

    Call it inside of `optimizer.step()`. A scaler skips steps without telling other ranks. Under local steps that rank would
    fall behind, and wait for the others in the end. If gradients are averaged, all scalers see the same values, and the next
    backward shows what was skipped; but a memory would send its residual under another scale.
    """
    if not is_called_by_scaler():
        return
    refuse(recipe, *SCALED)
    if recipe.may_average:
        refuse(recipe, *UNTOLD_MEANS)
        if recipe.exchange.owes:
            raise AttachError(
                f"{UNTOLD}{recipe.exchange} would keep gradients of one loss scale and send them under another; call "
                "attach(..., scaler=scaler)"
            )
    # Else it is fused, and skips by itself inside of step().
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        refuse(recipe, *UNTOLD_LOCAL)
