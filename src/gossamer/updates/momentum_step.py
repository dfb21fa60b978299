"""Shared code of updates that compute an adaptive optimizer's step: checks of the optimizer, moments, what is sent."""

from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Update
from gossamer.core.errors import AttachError

FAMILY = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
"""Optimizers that can apply a finished step; in older versions of torch AdamW is not a subclass of Adam."""


def fits(part: Any, binding: Binding, betas: tuple[float, float], eps: float) -> None:
    """Refuse optimizers that would not apply a finished step as learning rate times step."""
    for optimizer in binding.optimizers:
        kind = type(optimizer).__name__
        is_one = isinstance(optimizer, torch.optim.Optimizer)  # pyright: ignore[reportUnnecessaryIsInstance]  (or a stand-in)
        if is_one and not isinstance(optimizer, FAMILY):
            raise AttachError(
                f"{part} computes Adam's steps, and {kind} would change them; use torch.optim.AdamW, or torch.optim.SGD without momentum"
            )
        if isinstance(optimizer, torch.optim.SGD):
            binding.refuse_momentum(part, betas[0])
        for group in optimizer.param_groups:
            _check(part, kind, group, betas, eps)


def _check(part: Any, kind: str, group: dict[str, Any], betas: tuple[float, float], eps: float) -> None:
    for flag in ("amsgrad", "maximize", "fused"):
        if group.get(flag):
            raise AttachError(f"{part} with {kind}({flag}=True): {flag} is not supported; leave it out")
    if "betas" not in group:
        return
    said = (*(float(b) for b in group["betas"]), float(group["eps"]))
    if said != (*betas, eps):
        raise AttachError(
            f"{part} with {kind}(betas={said[:2]}, eps={said[2]}): the recipe computes the steps, with other values; use the same "
            f"in both: beta1={said[0]}, beta2={said[1]}, eps={said[2]} in the recipe"
        )
    if group["weight_decay"] and not group.get("decoupled_weight_decay", kind == "AdamW"):
        raise AttachError(
            f"{part} with {kind}(weight_decay={group['weight_decay']}): Adam adds the decay to the gradient, but ranks send a "
            "momentum; use AdamW, which decouples the decay"
        )


def frozen(v: Tensor, eps: float) -> Tensor:
    """Frozen divisor of all later steps: sqrt(v) + eps, infinite where v = 0, so that nothing moves there."""
    return v.sqrt().add_(eps).masked_fill_(v == 0, inf)


def corrected(moment: Tensor, beta: float, steps: int) -> Tensor:
    """The running mean with Adam's bias correction, as a new tensor."""
    return moment / (1 - beta**steps)


def running(old: Tensor | None, new: Tensor, beta: float) -> Tensor:
    """beta old + (1 - beta) new, as a new tensor."""
    return new * (1 - beta) if old is None else torch.add(old * beta, new, alpha=1 - beta)


def moments(mean: Bucket, state: State, betas: tuple[float, float], corrects_bias: bool) -> tuple[Tensor, Tensor, int]:
    """Count a step of Adam and follow both moments in `state`; returns them, with their biases corrected or not, and the count."""
    steps = int(state.get("steps", 0)) + 1
    state["steps"] = torch.tensor(steps)
    state["m"] = m = running(state.get("m"), mean.flat, betas[0])
    state["v"] = v = running(state.get("v"), mean.flat.square(), betas[1])
    if corrects_bias:
        m, v = corrected(m, betas[0], steps), corrected(v, betas[1], steps)
    return m, v, steps


class MomentumStep(Update):
    """An update that computes the whole step; after the freeze ranks send its momentum instead of the gradient."""

    is_step: ClassVar[bool] = True

    beta1: float

    @property
    def sends_momentum(self) -> bool:
        return True

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        """g before the freeze, then b m + (1 - b) g, written over g; zero where v was 0 at the freeze."""
        if "divisor" not in state:
            return gradient.flat
        momentum = gradient.flat.mul_(1 - self.beta1).add_(state["m"], alpha=self.beta1 * scale)
        return momentum.masked_fill_(state["still"], 0.0)
