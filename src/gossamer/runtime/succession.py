"""Hands the state of one recipe over to the next when a controller changes the recipe."""

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
    """Keep in the buckets the state that the next recipe uses: residuals of memories, and no state of other kinds of schedules."""
    for bucket in buckets:
        first = bucket.layout.segments[0]
        exchange, memory = after.way(first.name, first.shape)
        if memory != bucket.memory or type(exchange) is not type(bucket.exchange):
            _settle(bucket, size)
        state = bucket.states["memory"]
        if crosses(before.schedule, after.schedule):
            _replace(bucket, "memory", {})  # state learned from gradients does not apply to models
        elif memory != bucket.memory:
            _replace(bucket, "memory", memory.succeed(bucket.memory, state))
        if begins_anew(before.schedule, after.schedule):
            _replace(bucket, "schedule", {})
            _replace(bucket, "mixer", {})


def _settle(bucket: BucketState, size: int) -> None:
    """Move the residuals of chunk owners into their memories; where those keep none, the next average adds them."""
    state, exchange = bucket.states["memory"], bucket.states["exchange"]
    for key in owners(bucket, exchange):
        owed = exchange.pop(key)
        if not bucket.memory.inherit(state, owed, size):
            state[ARREARS] = torch.add(state.get(ARREARS, torch.zeros_like(owed)), owed, alpha=size)
        record_stream_use([owed])  # a comm thread made it, and it is released here


def _replace(bucket: BucketState, role: str, state: State) -> None:
    before, bucket.states[role] = bucket.states[role], state
    gone: list[Tensor] = [tensor for key, tensor in before.items() if state.get(key) is not tensor]
    record_stream_use(gone)  # a comm thread made them, and they are released here
