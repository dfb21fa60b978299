"""Closures: what users give to `optimizer.step` so that it computes the gradients. Here it is asked before they are averaged."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from gossamer.core.errors import AttachError

Closure = Callable[[], Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of `optimizer.step`, itself the first of them
INSTEAD = "use an optimizer that takes one gradient a step, such as SGD or AdamW"


def refuse_searches(optimizers: Sequence[Optimizer]) -> None:
    """Optimizers that ask their closure as often as they like."""
    for optimizer in optimizers:
        if any(base.__name__ == "LBFGS" for base in type(optimizer).__mro__):
            raise AttachError(
                f"{type(optimizer).__name__} computes the gradient anew at many points within one step, how many follows from "
                "what it finds, and none but the first would be averaged: each rank would search a minimum of its own data; "
                + INSTEAD
            )


def refuse_closure(another_has_stepped: bool, scaler: Any) -> None:
    """Closures whose gradients would come when it is too late to average them, or to look at them."""
    if another_has_stepped:
        raise AttachError(
            "a closure for the second optimizer of a step: its backward() would begin the next step before this one is over; "
            "give the closure to the first optimizer, and call the others' step() without one"
        )
    if scaler is not None and scaler.is_enabled():
        raise AttachError(
            "a closure with a GradScaler: the scaler looks at gradients that the closure is yet to compute; call backward() "
            "yourself, then scaler.step(optimizer)"
        )


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    return args[1] if len(args) > 1 else kwargs.get("closure")


def served(optimizer: Optimizer, closure: Closure, call: Call, alone: bool) -> Call:
    """Ask the closure now, once, so that its gradients are there and averaged when the optimizer steps.

    Returns the call with a closure in its place that knows the answer. Who is `alone` averages nothing, and may be asked
    again.
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
            f"first time were averaged, so that ranks would part; {INSTEAD}"
        )

    args, kwargs = call
    if len(args) > 1:
        return (args[0], answer, *args[2:]), kwargs
    return args, kwargs | {"closure": answer}
