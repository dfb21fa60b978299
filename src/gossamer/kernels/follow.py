"""The push-sum update of a model: a step on x, computed at z = x / w, in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.kernels.backends import twin
from gossamer.kernels.layout import require_count, require_vector


def follow(
    model: Sequence[Tensor], before: Tensor | float, kept: Tensor, came: Tensor | None, w: float, x: Tensor
) -> None:
    """x = (model - before) + kept + came;  model = x / w.

    The model comes in as many pieces as it has; what lies beside it is in one, and what was before may be given as what to
    divide kept by. In single or double precision; x overlaps with nothing else. Reads 8 bytes per element, 4 more of what was
    before and 4 of what came, and writes 8.
    """
    kind = torch.float64 if kept.dtype == torch.float64 else torch.float32
    for piece in model:
        require_vector("model", piece, kind)
    length = sum(piece.numel() for piece in model)
    for name, beside in {"before": before, "kept": kept, "came": came, "x": x}.items():
        if isinstance(beside, Tensor):
            require_vector(name, beside, kind)
            require_count(name, beside, length)
    twin("follow", "follow", kept.device)(model, before, kept, came, w, x)
