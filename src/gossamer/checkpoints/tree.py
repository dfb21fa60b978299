"""State tree: split a tree of states into named tensors to save it, and rebuild it from a checkpoint."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints.folder import Folder
from gossamer.core.errors import CheckpointError

PLACE = "gossamer/tensor"  # key that replaces a tensor in a tree


def clear(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return the tree with names in place of its tensors, and add the tensors to `tensors`."""
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach()
        return {PLACE: name}
    if isinstance(tree, Mapping):
        return {k: clear(v, f"{name}/{k}" if name else str(k), tensors) for k, v in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(clear(v, f"{name}/{i}", tensors) for i, v in enumerate(tree))
    return tree


def fill(tree: Any, find: Callable[[str], Tensor]) -> Any:
    """Return the tree with tensors in place of their names; the inverse of `clear`."""
    if isinstance(tree, dict) and tree.keys() == {PLACE}:
        return find(tree[PLACE])
    if isinstance(tree, dict):
        return {k: fill(v, find) for k, v in tree.items()}
    return type(tree)(fill(v, find) for v in tree) if type(tree) in (list, tuple) else tree


def mean_of_ranks(held: Sequence[Tensor], ranks: int) -> Tensor:
    """Return the mean over all old ranks; integers, and entries that not all ranks have, are taken from the first."""
    first = held[0]
    if len(held) < ranks or not first.is_floating_point() or any(t.shape != first.shape for t in held):
        return first
    return torch.stack([t.double() for t in held]).mean(0).to(first.dtype)


def pack(value: Any) -> Tensor:
    """Serialize a value with torch.save into a tensor of bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def digest(tensor: Tensor) -> str:
    """Return a 128-bit hash of a tensor, with its dtype and shape."""
    raw = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return f"{tensor.dtype} {list(tensor.shape)} {blake2b(raw.numpy().data, digest_size=16).hexdigest()}"


class Saved:
    """Reads model, optimizer and extra from a checkpoint, for one rank of the current world size."""

    def __init__(self, folder: Folder, size: int, rank: int, ranks: int) -> None:
        if f"own.rank{size - 1}/contents" not in folder:
            raise CheckpointError(f"{folder.path} is damaged: it does not hold the entries of all {size} ranks")
        self._folder, self._moved = folder, size != ranks
        self._ranks = list(range(size)) if self._moved else [rank]
        self._sums = {rank: self._contents(rank) for rank in self._ranks}

    def tree(self) -> dict[str, Any]:
        """Return the saved tree, with its tensors."""
        with io.BytesIO(self._tensor("frame").numpy().tobytes()) as file:
            return fill(torch.load(file, weights_only=True), self._tensor)

    def _tensor(self, name: str) -> Tensor:
        first = self._ranks[0]
        if f"own.rank{first}/{name}" not in self._folder:
            home = f"model.{name.removeprefix('model/')}" if name.startswith("model/") else f"own.equal/{name}"
            return self._checked(home, first, name)
        if self._moved and name.startswith("model/"):
            inner = name.removeprefix("model/")
            return self._checked(f"model.{inner}", 0, f"consensus/{inner}")
        if self._moved and name.startswith("optimizer/"):
            held = [self._checked(f"own.rank{r}/{name}", r, name) for r in self._ranks if name in self._sums[r]]
            return mean_of_ranks(held, len(self._ranks))
        return self._checked(f"own.rank{first}/{name}", first, name)

    def _contents(self, rank: int) -> dict[str, str]:
        try:
            sums = json.loads(self._folder.read(f"own.rank{rank}/contents"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._folder.path} is damaged: rank {rank}'s contents: {error}") from None
        return sums

    def _checked(self, home: str, rank: int, name: str) -> Tensor:
        if home not in self._folder:
            raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is missing")
        tensor = self._folder.read(home)
        if not isinstance(tensor, Tensor) or digest(tensor) != self._sums[rank].get(name):
            raise CheckpointError(f"{self._folder.path} is damaged: {home!r} is not what rank {rank} saved")
        return tensor
