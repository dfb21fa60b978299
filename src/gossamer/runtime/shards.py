"""Sharded entries, of which each rank keeps its own chunk only: how checkpoints store them, as pieces of parameters.

A piece is named by its parameter and its first element, `anchor/layer.weight@128`, so that any chunk can be
put together from the pieces of others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import CheckpointError
from gossamer.runtime.buckets import BucketState, word


def pieces(key: str, shard: Tensor, bucket: BucketState, rank: int, size: int) -> dict[str, Tensor]:
    """Split a rank's shard into pieces by parameter."""
    layout = bucket.layout.chunks(size)[rank]
    if shard.numel() != layout.numel:
        raise CheckpointError(
            f"{key!r} of the bucket of {bucket.name!r} has {shard.numel()} elements, and rank {rank} owns {layout.numel} of it"
        )
    return {f"{key}/{name}": view for name, view in Bucket(shard, layout).tensors()}


def put_together(key: str, entries: Mapping[str, Tensor], bucket: BucketState, rank: int, size: int) -> Tensor | None:
    """Assemble a rank's shard from pieces, perhaps of another cut; None if there are no pieces."""
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
            f"the checkpoint's {key} is sharded, and the given dictionaries hold {filled} of the {layout.numel} elements that rank {rank} "
            f"owns of the bucket of {bucket.name!r}: give the dictionaries of all ranks, load_state_dict([d0, d1, ...]), or load "
            "it with the buckets and parameter groups of the saved run; if a parameter was added just before saving, use another "
            "checkpoint"
        )
    return shard


def _by_parameter(key: str, entries: Mapping[str, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
    """The pieces of each parameter, by their first element."""
    found = dict[str, list[tuple[int, Tensor]]]()
    for entry, piece in entries.items():
        if word(entry) != key:
            continue
        name, _, first = entry.removeprefix(f"{key}/").rpartition("@")
        if not first.isdecimal():
            raise CheckpointError(f"the checkpoint is damaged: {entry!r} is not a piece of a parameter")
        found.setdefault(name, []).append((int(first), piece))
    return found
