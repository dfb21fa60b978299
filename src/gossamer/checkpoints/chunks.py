"""Chunks: the part of a tensor that one rank holds, in the format of `torch.distributed.checkpoint`, and parts cut from others.

FSDP2 cuts a parameter over the ranks of a replica along one dimension, and cuts the optimizer's state and gossamer's memories
alike. A folder stores each rank's chunk, so that another number of ranks can read what it needs.
"""

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from gossamer.core.errors import CheckpointError
from gossamer.runtime.params import is_sharded, local_part

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Where a part lies in a whole tensor."""

    offsets: Shape
    sizes: Shape
    whole: Shape


def box_of(tensor: Tensor) -> Box:
    """Where this rank's part of a tensor lies; of a plain tensor, everything."""
    whole: Shape = tuple(tensor.shape)
    offsets, sizes = [0] * len(whole), [*whole]
    for rank, count, dim in _cuts(tensor):
        step = -(-whole[dim] // count)
        offsets[dim] = min(rank * step, whole[dim])
        sizes[dim] = min(step, whole[dim] - offsets[dim])
    if tuple(sizes) != tuple(local_part(tensor).shape):
        raise CheckpointError(
            f"a tensor of shape {list(whole)} is cut into a part of {list(local_part(tensor).shape)}, where FSDP2 would cut "
            f"{sizes}: gossamer.checkpoint saves models that fully_shard has cut"
        )
    return Box(tuple(offsets), tuple(sizes), whole)


def _cuts(tensor: Any) -> Iterable[tuple[int, int, int]]:
    """This rank's number, the number of parts, and the dimension that is cut."""
    if not is_sharded(tensor):
        return
    for axis, place in enumerate(tensor.placements):
        if place.is_shard():
            yield tensor.device_mesh.get_local_rank(axis), tensor.device_mesh.size(axis), place.dim


def everything(whole: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    shape = tuple(whole)
    return Box((0,) * len(shape), shape, shape)


def is_cut(tensor: Tensor) -> bool:
    """True if other ranks of the replica hold other parts of it."""
    return any(count > 1 for _, count, _ in _cuts(tensor))


@final
class Chunk:
    """A part of a tensor, as DCP's planner takes it: through the three methods with underscores."""

    def __init__(self, data: Tensor, box: Box) -> None:
        self.data, self.box = data, box

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if not prod(self.box.sizes) and prod(self.box.whole):  # other ranks hold all of it
            return []
        offsets, sizes, whole = map(torch.Size, self.box)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties.create_from_tensor(self.data),
            size=whole,
        )
        return [WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)]


def planner() -> Any:
    """DCP's planner, which also finds the data of chunks, and hands the writer what is on the host."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class ChunkPlanner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            found: Any = self.state_dict[index.fqn]
            return found.data if isinstance(found, Chunk) else super().lookup_object(index)

        def resolve_data(self, write_item: Any) -> Any:
            # DCP's writer waits for copies of the current device alone, which need not be the one that holds the model.
            data = super().resolve_data(write_item)
            return data.cpu() if isinstance(data, Tensor) else data

    return ChunkPlanner()


class ReadChunk(NamedTuple):
    """A stored chunk that was read."""

    offsets: Shape
    data: Tensor


def overlaps(offsets: Shape, sizes: Shape, box: Box) -> bool:
    """True if a chunk holds elements of a box."""
    return all(a < c + d and c < a + b for a, b, c, d in zip(offsets, sizes, box.offsets, box.sizes, strict=True))


def assemble(pieces: Iterable[ReadChunk], box: Box) -> Tensor | None:
    """Put the part of a tensor together from chunks; None if elements are missing or chunks are of other types."""
    found = [p for p in pieces if p.data.dim() == len(box.whole)]
    if not found or len({p.data.dtype for p in found}) > 1:
        return None
    if len(found) == 1 and (found[0].offsets, tuple(found[0].data.shape)) == (box.offsets, box.sizes):
        return found[0].data
    inside = [
        (low, [min(a + n, b + m) for a, n, b, m in zip(p.offsets, p.data.shape, box.offsets, box.sizes)], p)
        for p in found
        for low in [[max(a, b) for a, b in zip(p.offsets, box.offsets)]]
    ]
    if sum(prod(h - low for low, h in zip(lows, highs)) for lows, highs, _ in inside) != prod(box.sizes):
        return None
    out = torch.empty(box.sizes, dtype=found[0].data.dtype, device="cpu")
    for lows, highs, piece in inside:
        _within(out, lows, highs, box.offsets).copy_(_within(piece.data, lows, highs, piece.offsets))
    return out


def _within(tensor: Tensor, lows: list[int], highs: list[int], origin: Shape) -> Tensor:
    for dim, (low, high, first) in enumerate(zip(lows, highs, origin, strict=True)):
        tensor = tensor.narrow(dim, low - first, high - low)
    return tensor
