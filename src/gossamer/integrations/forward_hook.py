"""Forward hook of backup workers: opens the quorum of a step when its forward pass begins."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """Calls `open_quorum` before each training forward; copies of the model get a `DetachedHook` instead."""

    def __init__(self, open_quorum: Callable[[], None]) -> None:
        self._open: Any = torch.compiler.disable(open_quorum)  # called by a compiled model too

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return DetachedHook, ()


class DetachedHook:
    """Does nothing; replaces a `ForwardHook` in copies of the model."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        return
