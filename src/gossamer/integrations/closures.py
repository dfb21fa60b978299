"""Closures: call the closure of `optimizer.step(closure)` before the step, so that its gradients can be averaged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.integrations.checks.introspection import kind_names

Closure = Callable[[], Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of `optimizer.step`, itself the first of them
INSTEAD = "use an optimizer that takes one gradient a step, such as SGD or AdamW"


def refuse_searches(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that call their closure many times within one step, as LBFGS does."""
    for optimizer in optimizers:
        if "LBFGS" in kind_names(type(optimizer)):
            raise AttachError(
                f"{type(optimizer).__name__} computes the gradient several times within one step, and only the first gradient "
                "would be averaged: each rank would search a minimum of its own data; " + INSTEAD
            )


def refuse_closure(another_has_stepped: bool, scaler: Any) -> None:
    """Refuse closures that would compute gradients too late to average or to unscale them."""
    if another_has_stepped:
        raise AttachError(
            "a closure was given to the second optimizer of a step: its backward() would begin the next step before this one is "
            "over; give the closure to the first optimizer, and call step() of the others without one"
        )
    if scaler is not None and scaler.is_enabled():
        raise AttachError(
            "a closure was given together with a GradScaler, which checks the gradients before the closure computes them; call "
            "backward() yourself, then scaler.step(optimizer)"
        )


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Return the closure among the arguments of `optimizer.step`, if there is one."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def served(optimizer: Optimizer, closure: Closure, call: Call, alone: bool) -> Call:
    """Call the closure once, now, so that its gradients are averaged before the optimizer steps.

    Returns the call with another closure, which returns the loss computed here. A rank that is `alone` averages nothing, and
    its optimizer may call the closure again.
    """
    with torch.enable_grad():
        loss = closure()
    asked = False

    def answer() -> Any:
        nonlocal asked
        if not asked:
            asked = True
            return loss
        if alone:
            return closure()
        raise AttachError(
            f"{type(optimizer).__name__} called its closure a second time within one step, and only the gradients of the "
            f"first call were averaged, so the models of the ranks would differ; {INSTEAD}"
        )

    args, kwargs = call
    if len(args) > 1:
        return (args[0], answer, *args[2:]), kwargs
    return args, kwargs | {"closure": answer}
