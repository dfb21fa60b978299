"""Units: what memories keep is as large as the gradients of then, which a loss scaler multiplies by another factor now."""

from collections.abc import Sequence
from math import isfinite

from torch import Tensor

from gossamer.core.block import State
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.moments import used_here
from gossamer.worker.channels import Channel


def rescale(part: Memory | Exchange, state: State, factor: float) -> list[Tensor]:
    """Multiply what comes in the gradients' units; returns what there was. Powers of two change no bit."""
    old = {key: tensor for key, tensor in state.items() if part.unit(key) == "gradient"}
    state.update({key: tensor * factor for key, tensor in old.items()})
    return list(old.values())


def follow(channels: Sequence[Channel], unit: float, scale: float) -> float:
    """Bring all states from one unit to another; returns the unit that they are in then.

    A scale that is no number to divide by leaves them alone: its gradients are not finite, or zero.
    """
    if scale == unit or not isfinite(scale) or scale <= 0:
        return unit
    for c in channels:
        old = rescale(c.memory, c.states["memory"], scale / unit)
        old += rescale(c.exchange, c.states["exchange"], scale / unit)
        used_here(old)  # a lane made them, and they are let go of here
    return scale


def adopt_format2(channels: Sequence[Channel], states: Sequence[dict[str, State]]) -> float:
    """In format 2 each memory and exchange kept a unit of its own; returns the one that all are in now."""
    own = [_own_unit(c, s) for c, s in zip(channels, states, strict=True)]
    unit = next((u for u in own if u is not None), 1.0)
    for channel, state, u in zip(channels, states, own, strict=True):
        if channel.memory.follows_rate and "unit" in state["memory"]:
            state["memory"]["unit"] = state["memory"]["unit"] / unit
        elif u is not None and u != unit:
            rescale(channel.memory, state["memory"], unit / u)
    return unit


def _own_unit(channel: Channel, state: dict[str, State]) -> float | None:
    owed = state["exchange"].pop("owed_scale", None)
    if channel.memory.follows_rate:  # its unit holds the rate as well, and stays with it
        return None
    kept = state["memory"].pop("unit", owed)
    return None if kept is None else float(kept)
