"""Succession: what becomes of what one recipe has kept when another one comes into force."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.changes import begins_anew, crosses
from gossamer.core.bucket import State
from gossamer.core.contracts import ARREARS
from gossamer.core.stream_events import record_stream_use
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState, owners


def hand_over(buckets: Sequence[BucketState], before: Recipe, after: Recipe, size: int) -> None:
    """Leave in the channels what the next recipe goes on with: of memories debts, and of schedules of another kind nothing."""
    for bucket in buckets:
        first = bucket.layout.segments[0]
        exchange, memory = after.way(first.name, first.shape)
        if memory != bucket.memory or type(exchange) is not type(bucket.exchange):
            _settle(bucket, size)
        state = bucket.states["memory"]
        if crosses(before.schedule, after.schedule):
            _replace(bucket, "memory", {})  # what was learned of gradients is nothing that is known of models
        elif memory != bucket.memory:
            _replace(bucket, "memory", memory.succeed(bucket.memory, state))
        if begins_anew(before.schedule, after.schedule):
            _replace(bucket, "schedule", {})
            _replace(bucket, "mixer", {})


def _settle(bucket: BucketState, size: int) -> None:
    """What owners owe to the mean moves to their memories; where those keep no such thing, the next average pays it."""
    state, exchange = bucket.states["memory"], bucket.states["exchange"]
    for key in owners(bucket, exchange):
        owed = exchange.pop(key)
        if not bucket.memory.inherit(state, owed, size):
            state[ARREARS] = torch.add(state.get(ARREARS, torch.zeros_like(owed)), owed, alpha=size)
        record_stream_use([owed])  # a lane made it, and it is let go of here


def _replace(bucket: BucketState, role: str, state: State) -> None:
    before, bucket.states[role] = bucket.states[role], state
    gone: list[Tensor] = [tensor for key, tensor in before.items() if state.get(key) is not tensor]
    record_stream_use(gone)  # a lane made them, and they are let go of here
