"""Succession: what becomes of what one recipe has kept when another one comes into force."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.changes import begins_anew, crosses
from gossamer.core.block import State
from gossamer.core.contracts import ARREARS
from gossamer.core.moments import used_here
from gossamer.recipe import Recipe
from gossamer.worker.channels import Channel, owners


def hand_over(channels: Sequence[Channel], before: Recipe, after: Recipe, size: int) -> None:
    """Leave in the channels what the next recipe goes on with: of memories debts, and of schedules of another kind nothing."""
    for channel in channels:
        first = channel.layout.segments[0]
        exchange, memory = after.way(first.name, first.shape)
        if memory != channel.memory or type(exchange) is not type(channel.exchange):
            _settle(channel, size)
        state = channel.states["memory"]
        if crosses(before.schedule, after.schedule):
            _replace(channel, "memory", {})  # what was learned of gradients is nothing that is known of models
        elif memory != channel.memory:
            _replace(channel, "memory", memory.succeed(channel.memory, state))
        if begins_anew(before.schedule, after.schedule):
            _replace(channel, "schedule", {})
            _replace(channel, "mixer", {})


def _settle(channel: Channel, size: int) -> None:
    """What owners owe to the mean moves to their memories; where those keep no such thing, the next average pays it."""
    state, exchange = channel.states["memory"], channel.states["exchange"]
    for key in owners(channel, exchange):
        owed = exchange.pop(key)
        if not channel.memory.inherit(state, owed, size):
            state[ARREARS] = torch.add(state.get(ARREARS, torch.zeros_like(owed)), owed, alpha=size)
        used_here([owed])  # a lane made it, and it is let go of here


def _replace(channel: Channel, role: str, state: State) -> None:
    before, channel.states[role] = channel.states[role], state
    gone: list[Tensor] = [tensor for key, tensor in before.items() if state.get(key) is not tensor]
    used_here(gone)  # a lane made them, and they are let go of here
