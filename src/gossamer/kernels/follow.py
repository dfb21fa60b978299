"""A step on x, taken where z = x / w was: what push-sum does to a model, in one pass over it."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.errors import require_count, require_vector


def follow(model: Tensor, before: Tensor, kept: Tensor, came: Tensor | None, w: float, x: Tensor, z: Tensor) -> None:
    """x = (model - before) + kept + came;  z = x / w;  model = z.

    In single or double precision; x and z overlap with nothing else. Reads 12 bytes per element, and 4 more of what came, and
    writes 12.
    """
    require_vector("model", model, torch.float64 if model.dtype == torch.float64 else torch.float32)
    for name, beside in {"before": before, "kept": kept, "x": x, "z": z}.items():
        _require(name, beside, model)
    if came is not None:
        _require("came", came, model)
    twin("follow", "follow", model.device)(model, before, kept, came, w, x, z)


def _require(name: str, beside: Tensor, model: Tensor) -> None:
    require_vector(name, beside, model.dtype)
    require_count(name, beside, model.numel())
