"""State tree: split a tree of states into named tensors to save it, and rebuild it from a checkpoint."""

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gossamer.checkpoints.chunks import Box, everything
from gossamer.checkpoints.folder import Folder
from gossamer.core.errors import CheckpointError, plainly

PLACE = "gossamer/tensor"  # key that replaces a tensor in a tree


def clear(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the tree with names in place of its tensors, and add the tensors to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach()
        return {PLACE: name}
    if isinstance(tree, np.generic):  # such as a learning rate that a schedule has computed
        return tree.item()
    if isinstance(tree, Mapping) and not isinstance(tree, Counter):
        return {k: clear(v, f"{name}/{k}" if name else str(k), tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(clear(v, f"{name}/{i}", tensors) for i, v in enumerate(tree))
    return tree


def fill(tree: Any, find: Callable[[str], Tensor]) -> Any:
    """Return the tree with tensors in place of their names; the inverse of `clear`."""
    if isinstance(tree, dict) and tree.keys() == {PLACE}:
        return find(tree[PLACE])
    if isinstance(tree, dict) and not isinstance(tree, Counter):
        return {k: fill(v, find) for k, v in tree.items()}
    return type(tree)(fill(v, find) for v in tree) if type(tree) in (list, tuple) else tree


def with_states_of_all(trees: Sequence[Any]) -> Any:
    """Return the first rank's tree, with the states of parameters that only other ranks' optimizers have moved."""
    first, *others = trees
    for other in others:
        for mine, theirs in zip(first["optimizer"], other["optimizer"]):
            mine["state"] = theirs["state"] | mine["state"]
    return first


def mean_of_ranks(held: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the mean over all old ranks; integers, and entries that not all ranks have, are taken from the first."""
    first = held[0]
    if len(held) < ranks or not first.is_floating_point() or any(t.shape != first.shape for t in held):
        return first
    return torch.stack([t.double() for t in held]).mean(0).to(first.dtype)


def pack(value: Any) -> Tensor:
    """Serialize a value with torch.save into a tensor of bytes; raise an error if `unpack` would not read it."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        packed = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        unpack(packed)
    except Exception as error:
        raise CheckpointError(
            f"this could not be loaded again, since loading runs no code: {plainly(error)}; keep tensors, numbers, texts, lists and "
            "dictionaries, such as torch.from_numpy(array), in `extra` and in what optimizers hold"
        ) from None
    return packed


def unpack(tensor: Tensor) -> Any:
    """Return the value that `pack` has serialized; no code in it is run."""
    with io.BytesIO(tensor.numpy().tobytes()) as file:
        return torch.load(file, weights_only=True)


def digest(tensor: Tensor) -> str:
    """Return a 128-bit hash of a tensor, with its dtype and shape."""
    raw = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {blake2b(raw.numpy().data, digest_size=16).hexdigest()}"


def place_of(rank: int, shard: int, shards: int) -> str:
    """Where a rank's own entries are; of a replica of several ranks, those of each shard."""
    return f"rank{rank}/" if shards == 1 else f"replica{rank}/shard{shard}/"


class ReadingRank(NamedTuple):
    """For which rank a checkpoint is read."""

    rank: int
    ranks: int  # replicas, of which each may be several ranks; 0 to read what belongs to none of them
    shard: int
    shards: int
    averages: frozenset[str] = frozenset()  # tensors of the model whose mean it wants, not the consensus


class Saved:
    """Reads model, optimizer and extra from a checkpoint, for one rank of the current numbers of ranks and shards.

    `box_for` says which part of a tensor of this name and shape is wanted; None means all of it.
    """

    def __init__(
        self,
        folder: Folder,
        size: int,
        shards: int,
        reader: ReadingRank,
        box_for: Callable[[str, tuple[int, ...]], Box | None],
    ) -> None:
        self._folder, self._shards, self._box_for = folder, shards, box_for
        self._moved, self._is_public = size != reader.ranks, reader.ranks == 0
        self._ranks = list(range(size)) if self._moved else [reader.rank]
        self._shard = reader.shard if shards == reader.shards else 0
        self._averages = frozenset[str]() if self._is_public else reader.averages
        if self._by_shard(size - 1, shards - 1, "contents") not in folder:
            raise CheckpointError(f"{folder.path} is damaged: it does not hold the entries of all {size} ranks")
        self._sums = {rank: [self._contents(rank, shard) for shard in range(shards)] for rank in {0, *self._ranks}}

    def frame(self) -> Any:
        """Return the saved tree, with names in place of its tensors."""
        own = {rank: home for rank in self._ranks if (home := self._own(rank, "frame"))}
        if not own:
            return unpack(self.tensor("frame"))
        return with_states_of_all([unpack(self._checked(home, rank, "frame")) for rank, home in own.items()])

    def tensor(self, name: str) -> Tensor:
        """Return the wanted part of a tensor."""
        first = next((rank for rank in self._ranks if self._own(rank, name)), self._ranks[0])
        inner = name.removeprefix("model/")
        if self._own(first, name) is None:
            once = f"own.equal/{name}"
            # A model that all ranks held and that is not the consensus is stored besides; only who goes on with it wants it.
            if inner == name or (once in self._folder and not self._is_public):
                return self._checked(once, first, name)
            if once not in self._folder:
                return self._checked(f"model.{inner}", first, name)
        if self._moved and (name.startswith("optimizer/") or name in self._averages):
            own = {rank: self._own(rank, name) for rank in self._ranks}
            held = [self._checked(home, rank, name) for rank, home in own.items() if home is not None]
            return mean_of_ranks(held, len(self._ranks))
        if self._moved and inner != name:
            return self._checked(f"model.{inner}", 0, f"consensus/{inner}", name)
        return self._checked(self._own(first, name) or "", first, name)

    def _by_shard(self, rank: int, shard: int, name: str) -> str:
        return f"own.{place_of(rank, shard, self._shards)}{name}"

    def _own(self, rank: int, name: str) -> str | None:
        """Where a rank's own entry is; None if it is stored once for all ranks."""
        places = (f"own.replica{rank}/{name}", self._by_shard(rank, self._shard, name))
        return next((place for place in places if place in self._folder), None)

    def _contents(self, rank: int, shard: int) -> dict[str, str]:
        try:
            sums = json.loads(self._folder.read(self._by_shard(rank, shard, "contents")))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder.path} is damaged: rank {rank}'s contents: {error}") from None
        return sums

    def _checked(self, home: str, rank: int, name: str, cut_like: str = "") -> Tensor:
        """Read the part that is wanted of `cut_like`, or `name`, and compare it with what a rank has saved under `name`."""
        if home not in self._folder:
            raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is missing")
        sums = {table.get(name) for table in self._sums[rank]}

        def check(tensor: Tensor) -> None:
            if digest(tensor) not in sums:
                raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is not what rank {rank} saved")

        shape = self._folder.shape(home)
        return self._folder.part(home, self._box_for(cut_like or name, shape) or everything(shape), check)
