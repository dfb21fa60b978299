"""Units: what memories keep is as large as the gradients of then, which a loss scaler multiplies by another factor now."""

from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from gossamer.core.bucket import State
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.stream_events import record_stream_use
from gossamer.runtime.buckets import BucketState


def rescale(part: Memory | Exchange, state: State, factor: float) -> list[Tensor]:
    """Multiply what comes in the gradients' units; returns what there was. Powers of two change no bit."""
    old = {key: tensor for key, tensor in state.items() if part.unit(key) == "gradient"}
    state.update({key: tensor * factor for key, tensor in old.items()})
    return list(old.values())


def follow(buckets: Sequence[BucketState], unit: float, scale: float) -> float:
    """Bring all states from one unit to another; returns the unit that they are in then.

    A scale that is no number to divide by leaves them alone: its gradients are not finite, or zero.
    """
    if scale == unit or not isfinite(scale) or scale <= 0:
        return unit
    for c in buckets:
        old = rescale(c.memory, c.states["memory"], scale / unit)
        old += rescale(c.exchange, c.states["exchange"], scale / unit)
        record_stream_use(old)  # a lane made them, and they are let go of here
    return scale
