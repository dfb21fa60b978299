"""Weight decay with momentum in the recipe: the decay is sent with the gradient, or it would be many times too weak.

An optimizer adds decay x to what it is given, which is 1 / (1 - m) times the gradient in the end where a part of the recipe has
momentum m. So the decay enters each rank's gradient before that leaves. The optimizer adds it as ever; that much is taken out
of the mean before, so that no integration needs to know of it.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError
from gossamer.core.parts import Part
from gossamer.runtime import optimizers

if TYPE_CHECKING:
    from gossamer.runtime.buckets import BucketState
    from gossamer.runtime.worker import Worker

_OPTIM = torch.optim
# Optimizers that add weight decay to the gradient, unless a group says that it is decoupled.
_COUPLED = (
    _OPTIM.SGD, _OPTIM.Adam, _OPTIM.RAdam, _OPTIM.NAdam, _OPTIM.Adamax, _OPTIM.RMSprop, _OPTIM.Adagrad, _OPTIM.Adadelta, _OPTIM.ASGD
)  # fmt: skip
# Optimizers with decoupled weight decay, which needs no change here.
_DECOUPLED = "AdamW", "Adafactor", "Muon"


class Decay:
    """The weight decay of parameters whose gradients pass through momentum in the recipe."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def refuse_unknown(self) -> None:
        """Raise AttachError for an optimizer whose kind of weight decay is unknown."""
        part = next((p for bucket in self._worker.buckets if (p := _with_momentum(bucket)) is not None), None)
        if part is None or self._worker.recipe.update is not None:
            return
        for optimizer in optimizers.members(self._worker.optimizer):
            if _is_coupled(optimizer) is None and any(map(_decay_of, optimizer.param_groups)):
                raise AttachError(
                    f"{part} with {type(_inner(optimizer)).__name__}: if this optimizer adds weight decay to gradients, it would be many "
                    "times weaker than without the momentum in the recipe, and only for torch's optimizers this is known; use one of "
                    "those, or weight_decay=0 and add the decay to the loss"
                )

    def enter(self, index: int, flat: Tensor) -> None:
        """Add the weight decay to a bucket's gradient before it is sent. Writes to `flat`."""
        factors = self._factors([index])
        if factors:
            self._add(self._worker.buckets[index], flat, factors, 1.0)

    def take_out(self, means: Sequence[Tensor]) -> None:
        """Subtract from the means the decay that the optimizer will add. Writes to the means, one per bucket."""
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
        """The coupled weight decay of each parameter; empty where no part of the recipe has momentum."""
        worker = self._worker
        if worker.recipe.update is not None:  # an update makes a step of its own, with decoupled decay
            return {}
        if all(_with_momentum(worker.buckets[i]) is None for i in which):
            return {}
        groups = [g for o in optimizers.members(worker.optimizer) if _is_coupled(o) for g in o.param_groups]
        return {id(p): factor for g in groups if (factor := _decay_of(g)) for p in g["params"]}


def _with_momentum(bucket: "BucketState") -> object | None:
    """The part that adds momentum to this bucket's gradient, if any."""
    parts = bucket.memory, bucket.exchange
    return next((part for part in parts if _adds_momentum(part)), None)


@cache
def _adds_momentum(part: Part) -> bool:
    """Asked at every step, twice; a part's traits do not change."""
    return "adds momentum" in part.traits


def _decay_of(group: dict[str, Any]) -> float:
    """The coupled weight decay of an optimizer's parameter group."""
    decay = 0.0 if group.get("decoupled_weight_decay") else float(group.get("weight_decay", 0.0))
    return -decay if group.get("maximize") else decay


def _is_coupled(optimizer: Any) -> bool | None:
    """True if an optimizer adds its weight decay to gradients; None if unknown."""
    inner = _inner(optimizer)
    if any(kind.__name__ in _DECOUPLED for kind in type(inner).__mro__):
        return False
    return True if isinstance(inner, _COUPLED) else None


def _inner(optimizer: Any) -> Any:
    """The inner optimizer of one that shards its state among ranks."""
    return getattr(optimizer, "optim", optimizer)
