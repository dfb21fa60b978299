"""Autograd's engine: which backward pass is under way, when it ends, and whether it runs inside of another one."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gossamer.core.torch_private import private_name

_pass_under_way: Callable[[], int] = private_name(torch._C, "_current_graph_task_id", "tells backward passes apart")
_engine: Any = private_name(torch.autograd.Variable, "_execution_engine", "hears of a backward pass's end")
_at_end: Callable[[Callable[[], None]], None] = private_name(
    _engine, "queue_callback", "hears of a backward pass's end"
)
_apply: Any = private_name(BackwardCFunction, "apply", "finds a backward pass inside of another one")
_code: Any = private_name(_apply, "__code__", "finds a backward pass inside of another one")


def pass_under_way() -> int:
    """The number of the backward pass that runs in this thread."""
    return _pass_under_way()


def at_end(callback: Callable[[], None]) -> None:
    """Call it when the backward pass under way is done."""
    _at_end(callback)


def is_nested() -> bool:
    """Does this backward pass run inside the backward of a function, as reentrant checkpointing does?

    Torch tells nobody (2.6 to 2.13). A pass inside of another one has a number of its own, in the callbacks at its end as well,
    and the outer one's is not to be had; the node that runs is the inner pass's too; Python cannot ask the engine how deep it
    is; and reentrant checkpointing calls `torch.autograd.backward` as anybody does. So the stack is looked at, at the first
    gradient of a pass.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _code:
            return True
        frame = frame.f_back
    return False
