"""Patches of torch for the time of a script: see the losses it calls backward() on, and the checkpoints it loads."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.core.errors import AttachError

UNSCALED = "_gossamer_unscaled"  # a loss before its GradScaler


@contextmanager
def patched_torch(on_backward: Callable[[Tensor], None], name: str, began: float) -> Generator[None]:
    """Pass every loss to `on_backward`, and refuse to load a checkpoint that an earlier run of this comparison has saved.

    The comparison began at the time `began`.
    """
    backward, load, scale = torch.autograd.backward, torch.load, torch.amp.GradScaler.scale
    started = time.time()

    def noted_backward(tensors: Any, *of: Any, **more: Any) -> Any:
        if isinstance(tensors, Tensor) and tensors.numel() == 1:
            on_backward(getattr(tensors, UNSCALED, tensors).detach())
        return backward(tensors, *of, **more)

    def noted_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if isinstance(outputs, Tensor) and scaled is not outputs:
            setattr(scaled, UNSCALED, outputs.detach())
        return scaled

    def checked_load(f: Any, *of: Any, **more: Any) -> Any:
        _refuse_others_checkpoint(f, name, began, started)
        return load(f, *of, **more)

    scaler: Any = torch.amp.GradScaler
    torch.autograd.backward, scaler.scale, torch.load = noted_backward, noted_scale, checked_load
    try:
        yield
    finally:
        torch.autograd.backward, scaler.scale, torch.load = backward, scale, load


def _refuse_others_checkpoint(file: Any, name: str, began: float, started: float) -> None:
    """Raise AttachError if the file was written by an earlier run of this comparison."""
    path = getattr(file, "name", file)
    if not isinstance(path, str | os.PathLike):
        return
    try:
        changed = Path(path).stat().st_mtime
    except OSError:  # torch has the better error
        return
    if began < changed < started:
        raise AttachError(
            f"{name} loads {Path(path).name}, which it saved under another recipe of this comparison, and would continue from there: "
            "give each recipe its own place, by an argument (-- --out_dir=out-{recipe}) or a folder to run in (--cwd "
            "out-{recipe}); if it is no checkpoint but prepared data, run the script once before"
        )
