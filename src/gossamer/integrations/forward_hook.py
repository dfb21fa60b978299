"""The opener: the forward hook of backup workers, which lets a step's quorum begin when its training does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ForwardHook:
    """It stays behind when a model is copied or saved: it belongs to this run."""

    def __init__(self, open_quorum: Callable[[], None]) -> None:
        self._open: Any = torch.compiler.disable(open_quorum)  # called by a compiled model too

    def __call__(self, module: nn.Module, args: Any) -> None:
        if module.training:
            self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return DetachedHook, ()


class DetachedHook:
    """What is left of a hook in a copy of the model."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        return
