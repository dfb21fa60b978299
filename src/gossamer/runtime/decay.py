"""Weight decay beside momentum that the recipe keeps: it goes the gradient's way, or it would count many times less.

An optimizer adds decay x to what it is given, which is 1 / (1 - m) times the gradient in the end where a part of the recipe has
momentum m. So the decay enters each rank's gradient before that leaves. The optimizer adds it as ever; that much is taken out
of the mean before, so that no host needs to know of it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError
from gossamer.runtime import optimizers

if TYPE_CHECKING:
    from gossamer.runtime.buckets import BucketState
    from gossamer.runtime.worker import Worker

_OPTIM = torch.optim
# Whose weight decay is a part of the gradient, unless a group says that it is decoupled.
_COUPLED = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.RAdam, _OPTIM.NAdam, _OPTIM.Adamax, _OPTIM.RMSprop, _OPTIM.Adagrad, _OPTIM.Adadelta, _OPTIM.ASGD
)  # fmt: skip
# Whose shrinks parameters beside the gradient: it is what it would be beside momentum of the optimizer's own.
_DECOUPLED = "AdamW", "Adafactor", "Muon"


class Decay:
    """What a worker's optimizer decays of parameters whose gradients meet momentum in the recipe."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def refuse_unknown(self) -> None:
        """Raise AttachError for an optimizer of which nobody can say what its weight decay does."""
        part = next((p for c in self._worker.buckets if (p := _with_momentum(c)) is not None), None)
        if part is None or self._worker.recipe.update is not None:
            return
        for optimizer in optimizers.members(self._worker.optimizer):
            if _is_coupled(optimizer) is None and any(map(_decay_of, optimizer.param_groups)):
                raise AttachError(
                    f"{part} with {type(_inner(optimizer)).__name__}: if that adds its weight decay to gradients, it would count many "
                    "times less than without the momentum in the recipe, and which optimizers do is known of torch's only; use one of "
                    "those, or weight_decay=0 and the decay as a term of the loss"
                )

    def enter(self, index: int, flat: Tensor) -> None:
        """The gradient of a channel is about to leave: its decay leaves with it. `flat` is written to."""
        factors = self._factors([index])
        if factors:
            self._add(self._worker.buckets[index], flat, factors, 1.0)

    def take_out(self, means: Sequence[Tensor]) -> None:
        """What the optimizer is about to add; the means, one of each channel, are written to."""
        factors = self._factors(range(len(means)))
        for bucket, mean in zip(self._worker.buckets, means) if factors else ():
            self._add(bucket, mean, factors, -1.0)

    def _add(self, bucket: "BucketState", flat: Tensor, factors: dict[int, float], times: float) -> None:
        if _with_momentum(bucket) is None:
            return
        times *= self._worker.scale
        with torch.no_grad():
            for param, (_, view) in zip(bucket.params, Bucket(flat, bucket.layout).tensors(), strict=True):
                factor = factors.get(id(param.parameter), 0.0)
                if factor and param.trains:
                    view.add_(param.values, alpha=times * factor)

    def _factors(self, which: Sequence[int]) -> dict[int, float]:
        """By parameter, what of it its optimizer adds to the gradient; none where no part between them has momentum."""
        worker = self._worker
        if worker.recipe.update is not None:  # which makes a step of its own, with decay beside it
            return {}
        if all(_with_momentum(worker.buckets[i]) is None for i in which):
            return {}
        groups = [g for o in optimizers.members(worker.optimizer) if _is_coupled(o) for g in o.param_groups]
        return {id(p): factor for g in groups if (factor := _decay_of(g)) for p in g["params"]}


def _with_momentum(bucket: "BucketState") -> object | None:
    """The part that adds momentum to what this channel sends."""
    parts = bucket.memory, bucket.exchange
    return next((part for part in parts if "adds momentum" in part.traits), None)


def _decay_of(group: dict[str, Any]) -> float:
    """What an optimizer's parameter group adds of its parameters to their gradients, where it is coupled."""
    decay = 0.0 if group.get("decoupled_weight_decay") else float(group.get("weight_decay", 0.0))
    return -decay if group.get("maximize") else decay


def _is_coupled(optimizer: Any) -> bool | None:
    """Whether an optimizer adds its weight decay to gradients; None if nobody knows."""
    inner = _inner(optimizer)
    if any(kind.__name__ in _DECOUPLED for kind in type(inner).__mro__):
        return False
    return True if isinstance(inner, _COUPLED) else None


def _inner(optimizer: Any) -> Any:
    """The one that steps, where another one shares its state among ranks."""
    return getattr(optimizer, "optim", optimizer)
