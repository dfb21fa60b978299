"""Loss scale: rescales the state of memories when a loss scaler changes its factor."""

from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.stream_events import record_stream_use
from gossamer.runtime.buckets import BucketState


def rescale(part: Memory | Exchange, state: State, factor: float) -> list[Tensor]:
    """Multiply the entries in gradient units; returns the old tensors. Powers of two are exact."""
    old = {key: tensor for key, tensor in state.items() if part.unit(key) == "gradient"}
    state.update({key: tensor * factor for key, tensor in old.items()})
    return list(old.values())


def follow(buckets: Sequence[BucketState], unit: float, scale: float) -> float:
    """Rescale all states from one loss scale to another; returns the loss scale that they have then.

    A scale that is zero or not finite changes nothing: the gradients are then zero or not finite.
    """
    if scale == unit or not isfinite(scale) or scale <= 0:
        return unit
    for bucket in buckets:
        old = rescale(bucket.memory, bucket.states["memory"], scale / unit)
        old += rescale(bucket.exchange, bucket.states["exchange"], scale / unit)
        record_stream_use(old)  # a comm thread made them, and they are released here
    return scale
