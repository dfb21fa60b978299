"""Hands the state of one recipe over to the next when a controller changes the recipe, and the state of buckets to others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.changes import begins_anew, crosses
from gossamer.core.bucket import Bucket, Layout, State, entry_name
from gossamer.core.contracts import Exchange, Memory
from gossamer.core.errors import CheckpointError
from gossamer.core.stream_events import record_stream_use
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import ROLES, BucketState, settle_or_owe


def hand_over(buckets: Sequence[BucketState], before: Recipe, after: Recipe, size: int) -> list[BucketState]:
    """Keep in the buckets the state that the next recipe uses: residuals of memories, and no state of other kinds of schedules.
    An exchange of the same kind keeps the residual of the one before it.

    Returns the buckets; one whose parameters part is cut up, so that all of a piece go the same way.
    """
    pieces = [piece for bucket in buckets for piece in _cut_up(bucket, after, size)]
    for bucket in pieces:
        exchange, memory = _way(bucket, 0, after)
        if memory != bucket.memory or type(exchange) is not type(bucket.exchange):
            settle_or_owe(bucket, size)
        state = bucket.states["memory"]
        if crosses(before.schedule, after.schedule):
            _replace(bucket, "memory", {})  # state learned from gradients does not apply to models
        elif memory != bucket.memory:
            _replace(bucket, "memory", memory.succeed(bucket.memory, state))
        if begins_anew(before.schedule, after.schedule):
            _replace(bucket, "schedule", {})
            _replace(bucket, "mixer", {})
    return pieces


def _way(bucket: BucketState, index: int, recipe: Recipe) -> tuple[Exchange, Memory]:
    """The exchange and the memory of a bucket's parameter."""
    return recipe.way(bucket.layout.segments[index].name, bucket.params[index].whole_shape)


def _cut_up(bucket: BucketState, after: Recipe, size: int) -> list[BucketState]:
    """The bucket, or its pieces if its parameters go different ways under the next recipe, with the state of each."""
    ways = [_way(bucket, i, after) for i in range(len(bucket.params))]
    if len(set(ways)) == 1:
        return [bucket]
    settle_or_owe(bucket, size)
    held = {role: by_parameter(bucket.states[role], bucket) for role in ROLES}
    out = list[BucketState]()
    for way in dict.fromkeys(ways):
        mine = [i for i, other in enumerate(ways) if other == way]
        segments = [bucket.layout.segments[i] for i in mine]
        layout = Layout.of({s.name: s.shape for s in segments}, bucket.layout.dtype)
        piece = replace(bucket, layout=layout, params=tuple(bucket.params[i] for i in mine))
        piece.states = {role: by_bucket(piece, held[role]) for role in ROLES}
        out.append(piece)
    record_stream_use(t for state in held.values() for t in state.values())
    return out


def carry_over(old: Sequence[BucketState], new: Sequence[BucketState], size: int) -> None:
    """Move each parameter's memory to its new bucket after a controller's change."""
    everything = dict[str, Tensor]()
    for bucket in old:
        settle_or_owe(bucket, size)
        for role in ROLES:
            for key, tensor in by_parameter(bucket.states[role], bucket).items():
                everything[f"{role}/{key}"] = tensor
    record_stream_use(everything.values())  # a comm thread made them, and they are released here
    for bucket in new:
        for role in ROLES:
            bucket.states[role] = by_bucket(
                bucket, {k.removeprefix(f"{role}/"): v for k, v in everything.items() if k.startswith(f"{role}/")}
            )


def replace_parts(buckets: Sequence[BucketState], others: Sequence[BucketState]) -> None:
    """Give the same buckets other exchanges and memories after a controller's change that keeps the cut; nothing is copied."""
    for bucket, other in zip(buckets, others, strict=True):
        bucket.exchange, bucket.memory, bucket.shift = other.exchange, other.memory, other.shift
        bucket.group, bucket.fragment = other.group, other.fragment


def by_parameter(state: State, bucket: BucketState) -> dict[str, Tensor]:
    """Flat tensors by parameter; scalars for each parameter; keys with a colon name their parameter themselves."""
    out = dict[str, Tensor]()
    for key, tensor in state.items():
        if ":" in key:
            out[key] = tensor
        elif tensor.dtype == torch.uint8:
            out[f"{key}/{bucket.name}"] = tensor
        elif tensor.dim() == 0:
            out |= {f"{key}/{s.name}": tensor for s in bucket.layout.segments}
        elif tensor.numel() != bucket.layout.numel:
            raise CheckpointError(
                f"{key!r} of the bucket of {bucket.name!r} has {tensor.numel()} elements, and the bucket {bucket.layout.numel}: a "
                f"part may keep scalars, tensors as long as its bucket, and tensors of one parameter under '{key}:NAME'"
            )
        else:
            # at least one dimension: a tensor without is a scalar that all parameters share
            out |= {f"{key}/{n}": torch.atleast_1d(view) for n, view in Bucket(tensor, bucket.layout).tensors()}
    return out


def by_bucket(bucket: BucketState, entries: Mapping[str, Tensor]) -> State:
    """The inverse of `by_parameter`; missing parameters are zero."""
    state: State = {}
    names = dict.fromkeys(bucket.names)
    for key in dict.fromkeys(map(entry_name, entries)):
        found = {name: entries[f"{key}/{name}"] for name in names if f"{key}/{name}" in entries}
        if found and ":" not in key:
            state[key] = _put_together(key, found, bucket)
    named = {k: v for k, v in entries.items() if ":" in entry_name(k) and k.partition(":")[2] in names}
    return state | {k: home(v, bucket) for k, v in named.items()}


def _put_together(key: str, found: Mapping[str, Tensor], bucket: BucketState) -> Tensor:
    """One entry of a bucket's state, from that of its parameters."""
    sample = next(iter(found.values()))
    if sample.dim() == 0 or sample.dtype == torch.uint8:
        return home(sample, bucket)
    flat = bucket.empty().to(sample.dtype)
    for name, view in Bucket(flat, bucket.layout).tensors():
        if name not in found:
            continue
        if found[name].numel() != view.numel():
            raise CheckpointError(
                f"{key} of {name!r} has {found[name].numel()} elements, and {name!r} has {view.numel()}"
            )
        view.copy_(found[name].view(view.shape))
    return flat


def home(tensor: Tensor, bucket: BucketState) -> Tensor:
    """Copy a loaded tensor to where it is read: scalars to the host, others to the parameters' device."""
    return tensor.to(bucket.device if tensor.dim() else "cpu", copy=True)


def _replace(bucket: BucketState, role: str, state: State) -> None:
    before, bucket.states[role] = bucket.states[role], state
    gone: list[Tensor] = [tensor for key, tensor in before.items() if state.get(key) is not tensor]
    record_stream_use(gone)  # a comm thread made them, and they are released here
