"""Autograd engine: identify the current backward pass, call back at its end, and detect nested passes."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gossamer.core.torch_private import private_name

_pass_under_way: Callable[[], int] = private_name(torch._C, "_current_graph_task_id", "tells backward passes apart")
_engine: Any = private_name(torch.autograd.Variable, "_execution_engine", "detects the end of a backward pass")
_at_end: Callable[[Callable[[], None]], None] = private_name(
    _engine, "queue_callback", "detects the end of a backward pass"
)
_apply: Any = private_name(BackwardCFunction, "apply", "detects a backward pass inside another one")
_code: Any = private_name(_apply, "__code__", "detects a backward pass inside another one")


def pass_under_way() -> int:
    """Return the id of the backward pass that runs in this thread."""
    return _pass_under_way()


def at_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass is done."""
    _at_end(callback)


def is_nested() -> bool:
    """True if this backward pass runs inside the backward of a function, as with reentrant checkpointing.

    Torch (2.6 to 2.13) has no call for it. A nested pass has its own id, also in its callbacks, and the id of the outer pass
    is not available; the current node belongs to the inner pass; the engine's depth is not exposed to Python; and reentrant
    checkpointing calls `torch.autograd.backward` as users do. So this function searches the Python stack, at the first
    gradient of a pass.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _code:
            return True
        frame = frame.f_back
    return False
