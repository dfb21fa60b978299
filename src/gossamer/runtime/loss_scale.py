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


def adopt_format2(buckets: Sequence[BucketState], states: Sequence[dict[str, State]]) -> float:
    """In format 2 each memory and exchange kept a unit of its own; returns the one that all are in now."""
    own = [_own_unit(c, s) for c, s in zip(buckets, states, strict=True)]
    unit = next((u for u in own if u is not None), 1.0)
    for bucket, state, u in zip(buckets, states, own, strict=True):
        if bucket.memory.follows_rate and "unit" in state["memory"]:
            state["memory"]["unit"] = state["memory"]["unit"] / unit
        elif u is not None and u != unit:
            rescale(bucket.memory, state["memory"], unit / u)
    return unit


def _own_unit(bucket: BucketState, state: dict[str, State]) -> float | None:
    owed = state["exchange"].pop("owed_scale", None)
    if bucket.memory.follows_rate:  # its unit holds the rate as well, and stays with it
        return None
    kept = state["memory"].pop("unit", owed)
    return None if kept is None else float(kept)
