"""Shards: entries of which a rank keeps its own chunk's elements only, as they lie in a checkpoint: piece by piece of parameters.

A piece is called by its parameter and the element that it begins with, `anchor/layer.weight@128`, so that any chunk can be
put together from the pieces of others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import CheckpointError
from gossamer.runtime.buckets import BucketState, word


def pieces(key: str, shard: Tensor, bucket: BucketState, rank: int, size: int) -> dict[str, Tensor]:
    """What a rank keeps, by parameter."""
    layout = bucket.layout.chunks(size)[rank]
    if shard.numel() != layout.numel:
        raise CheckpointError(
            f"{key!r} of the block of {bucket.name!r} has {shard.numel()} elements, and rank {rank} owns {layout.numel} of it"
        )
    return {f"{key}/{name}": view for name, view in Bucket(shard, layout).tensors()}


def put_together(key: str, entries: Mapping[str, Tensor], bucket: BucketState, rank: int, size: int) -> Tensor | None:
    """What a rank keeps, out of pieces that were cut otherwise, perhaps; None if nobody kept any."""
    found = _by_parameter(key, entries)
    if not found:
        return None
    layout, filled = bucket.layout.chunks(size)[rank], 0
    shard = torch.empty(layout.numel, dtype=layout.dtype, device=bucket.device)
    for segment in layout.segments:
        name, _, first = segment.name.rpartition("@")
        begin, end = int(first), int(first) + segment.numel
        for at, piece in found.get(name, []):
            low, high = max(begin, at), min(end, at + piece.numel())
            if low < high:
                place = segment.offset + low - begin
                shard[place : place + high - low] = piece.view(-1)[low - at : high - at]
                filled += high - low
    if filled != layout.numel:
        raise CheckpointError(
            f"the checkpoint's {key} lies in shards, of which {filled} of the {layout.numel} elements are here that rank {rank} "
            f"owns of the block of {bucket.name!r}: give the dictionaries of all ranks, load_state_dict([d0, d1, ...]), or load "
            "it with the buckets and parameter groups of then; or a parameter was added just before it was saved: take another "
            "checkpoint"
        )
    return shard


def _by_parameter(key: str, entries: Mapping[str, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
    """The pieces of each parameter, and where they begin."""
    found = dict[str, list[tuple[int, Tensor]]]()
    for entry, piece in entries.items():
        if word(entry) != key:
            continue
        name, _, first = entry.removeprefix(f"{key}/").rpartition("@")
        if not first.isdecimal():
            raise CheckpointError(f"the checkpoint is damaged: {entry!r} is no piece of a parameter")
        found.setdefault(name, []).append((int(first), piece))
    return found
