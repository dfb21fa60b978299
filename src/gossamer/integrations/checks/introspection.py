"""What torch does not tell, and is looked up in its private names, in the Python stack, or among all modules.

Here is all of it: identify the current backward pass, call back at its end, detect nested passes, find out whether a GradScaler
calls, and find modules of a class.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer

from gossamer.core.torch_private import private_name

# The id of the backward pass that runs in this thread.
pass_under_way: Callable[[], int] = private_name(torch._C, "_current_graph_task_id", "tells backward passes apart")
_engine: Any = private_name(torch.autograd.Variable, "_execution_engine", "detects the end of a backward pass")
# Calls what it is given when the current backward pass is done.
at_end: Callable[[Callable[[], None]], None] = private_name(
    _engine, "queue_callback", "detects the end of a backward pass"
)
_apply: Any = private_name(BackwardCFunction, "apply", "detects a backward pass inside another one")
_code: Any = private_name(_apply, "__code__", "detects a backward pass inside another one")
_step_code: Any = private_name(
    private_name(GradScaler, "step", "detects a scaler that was not passed to attach"),
    "__code__",
    "detects such a scaler",
)
_hooked: Any = Optimizer.profile_hook_step(lambda: None)  # what torch puts around `step` of a class: it calls the hooks
# Functions whose backward hands out gradients of the same pass.
not_nested = set[Any]()


def is_nested() -> bool:
    """True if this backward pass runs inside the backward of a function, as with reentrant checkpointing.

    Torch (2.6 to 2.13) has no call for it. A nested pass has its own id, also in its callbacks, and the id of the outer pass
    is not available; the current node belongs to the inner pass; the engine's depth is not exposed to Python; and reentrant
    checkpointing calls `torch.autograd.backward` as users do. So this function searches the Python stack, at the first
    gradient of a pass.
    """
    frame = _running(_code, sys._getframe())
    while frame is not None and getattr(frame.f_locals.get("self"), "_forward_cls", None) in not_nested:
        frame = _running(_code, frame.f_back)
    return frame is not None


def is_called_by_scaler() -> bool:
    """True if an enabled GradScaler is calling this `optimizer.step()`, found by searching the Python stack.

    Torch (2.6 to 2.13) offers no other way: a scaler passes no argument of its own to `optimizer.step()`, has no hooks, and
    keeps its result (`_found_inf_per_device`) to itself. It sets `grad_scale` and `found_inf` on fused optimizers only.
    """
    frame = _running(_step_code, sys._getframe())
    return frame is not None and bool(frame.f_locals["self"].is_enabled())


def is_within_its_step(optimizer: Optimizer) -> bool:
    """True in a hook of a `step()` that the same optimizer's `step()` has called, as by `super().step()`.

    Torch wraps each class of which there has been an optimizer, and each wrapper calls the hooks: some steps call them twice.
    """
    frame = _running(_hooked.__code__, sys._getframe())
    while frame is not None and (frame := _running(_hooked.__code__, frame.f_back)) is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
    return False


def _running(code: CodeType, frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that runs this code, from `frame` outwards. On a GPU a backward pass may be the outermost."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


# By names: how many references the classes had, and which modules were found.
_found = dict[frozenset[str], tuple[dict[int, int], list[ref[nn.Module]]]]()


def living(names: Collection[str]) -> list[nn.Module]:
    """Return all modules of the process whose class, or a base of it, has one of these names.

    A wrapper leaves no mark on the module inside it. We ask for what refers to the classes, and not for all objects: among those
    is a tuple that a comm thread has begun, and to hold it for a moment ends that thread in a SystemError. That takes 20 to 75 ms,
    so we search again only where one of them is gone, or its class is referred to more or less often, as each module refers to its own.
    """
    kinds = {kind for kind in _kinds_of(nn.Module) if not kind_names(kind).isdisjoint(names)}
    counts, key = {id(kind): sys.getrefcount(kind) for kind in kinds}, frozenset(names)
    before, found = _found.get(key, ({}, []))
    if counts != before or any(each() is None for each in found):
        found = [ref(o) for o in gc.get_referrers(*kinds) if type(o) in kinds] if kinds else []
        _found[key] = counts, found
    return [module for each in found if (module := each()) is not None]


def _kinds_of(base: type) -> Iterator[type]:
    """A class and all that derive from it."""
    yield base
    for kind in base.__subclasses__():
        yield from _kinds_of(kind)


def kind_names(kind: type) -> set[str]:
    """Return the names of a class and its bases; comparing names avoids importing other packages."""
    return {base.__name__ for base in kind.__mro__}
