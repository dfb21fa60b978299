"""What a folder of `checkpoint.save` holds for this rank: read and checked before anything is changed, then put in its place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gossamer.checkpoints import sharded
from gossamer.checkpoints.chunks import Box, box_of
from gossamer.checkpoints.folder import Folder
from gossamer.checkpoints.manifest import cut
from gossamer.checkpoints.state import prepare
from gossamer.checkpoints.tree import ReadingRank, Saved, fill, place_of
from gossamer.core.errors import CheckpointError, plainly
from gossamer.integrations.all_ranks import Attached
from gossamer.integrations.communicator import Communicator
from gossamer.runtime import is_sharded
from gossamer.runtime.params import whole_of

ORDER = "order"  # where the position in the data is kept


class DataOrder(Protocol):
    """A place in the data, such as a `gossamer.data.Order`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Found(NamedTuple):
    """What a folder holds for this rank, checked."""

    state: list[dict[str, Any]] | None  # for `load_state_dict`; None where the communicator begins anew
    tree: dict[str, Any]  # model, optimizers, order and extra; empty where a folder has the communicator only


def find(folder: Folder, comm: Attached, key: str, strict: bool) -> Found:
    """Read what this rank needs to go on exactly."""
    state = communicator_of(folder, f"{key}.", comm, strict)
    if comm.worker.replica.size > 1:  # shards agree before any of them changes
        prepare(comm.worker, state)
    shards = sharded.shards_of(folder, f"{key}.")
    if not isinstance(comm, Communicator) or f"own.{place_of(0, 0, shards)}contents" not in folder:
        return Found(state, {})
    tree = tree_of(folder, int(state[0]["size"]), shards, comm)
    check_model(comm.model, tree["model"])
    return Found(state, tree)


def find_public(folder: Folder, comm: Attached, key: str) -> Found:
    """Read what belongs to no rank: the consensus, the mean of the optimizer states, the order of the data and `extra`."""
    if not isinstance(comm, Communicator) or not any(name.startswith("own.") for name in folder):
        raise CheckpointError(
            f"public_only=True takes the model and the optimizer from {folder.path}, and needs what gossamer.checkpoint.save() has "
            "written of a model that gossamer.attach() has attached"
        )
    if comm.step:
        raise CheckpointError(
            f"public_only=True begins with memories at zero, but {comm.step} steps were taken already: load before the first"
        )
    tree = tree_of(folder, size_of(folder, f"{key}."), sharded.shards_of(folder, f"{key}."), comm, ranks=0)
    check_model(comm.model, tree["model"])
    return Found(None, tree)


def tree_of(folder: Folder, size: int, shards: int, comm: Communicator, ranks: int | None = None) -> dict[str, Any]:
    """Read model, optimizers and extra; what this run shards is cut as it is now. `ranks=0`: what belongs to no rank."""
    replica, cut_like = comm.worker.replica, _CutLike(comm)
    averages = trained(comm) if comm.recipe.schedule.shape.evaluates_another else frozenset[str]()
    reader = ReadingRank(
        comm.worker.rank, comm.worker.size if ranks is None else ranks, replica.index, replica.size, averages
    )
    saved = Saved(folder, size, shards, reader, cut_like.box)
    return fill(saved.frame(), lambda name: cut_like.whole(name, saved.tensor(name)))


def trained(comm: Communicator) -> frozenset[str]:
    """The names of all parameters that are trained; one that is tied has several."""
    ours = {id(param.parameter) for param in comm.worker.params.values()}
    return frozenset(
        f"model/{name}" for name, p in comm.model.named_parameters(remove_duplicate=False) if id(p) in ours
    )


class _CutLike:
    """Which tensors of a checkpoint this run shards, and how: as its own model, and the optimizer's state as its parameter."""

    def __init__(self, comm: Communicator) -> None:
        self._model = comm.model.state_dict()
        self._params = [[p for group in o.param_groups for p in group["params"]] for o in comm.optimizers]
        self._found = dict[str, Tensor]()

    def box(self, name: str, shape: tuple[int, ...]) -> Box | None:
        like = self._like(name)
        if not isinstance(like, Tensor) or not is_sharded(like) or tuple(like.shape) != shape:
            return None
        self._found[name] = like
        return box_of(like)

    def whole(self, name: str, part: Tensor) -> Tensor:
        like = self._found.get(name)
        return part if like is None else whole_of(part.to(like.device), like)

    def _like(self, name: str) -> Any:
        if name.startswith("model/"):
            return self._model.get(name.removeprefix("model/"))
        named = name.split("/")
        if named[0] != "optimizer" or len(named) != 5 or named[2] != "state":
            return None
        params = self._params[int(named[1])] if int(named[1]) < len(self._params) else []
        return params[int(named[3])] if int(named[3]) < len(params) else None


def communicator_of(folder: Folder, prefix: str, comm: Attached, strict: bool) -> list[dict[str, Any]]:
    """Read the communicator's entries, and only those that this rank needs."""
    names = [n for n in folder if n.startswith(prefix)]
    if not names:
        held = sorted({n.split(".")[0] for n in folder})
        raise CheckpointError(f"{folder.path} holds nothing under {prefix[:-1]!r}; it was saved under {held}")
    size = size_of(folder, prefix)
    cut_alike = f"{prefix}cut" in folder and folder.read(f"{prefix}cut") == json.dumps(cut(comm.worker.buckets))
    in_shards = comm.worker.recipe.schedule.policy("anchor") == "shard"
    shards = sharded.shards_of(folder, prefix)
    alone = size == comm.worker.size and (cut_alike or not in_shards) and shards == comm.worker.replica.size
    if shards > 1 or comm.worker.replica.size > 1:
        return sharded.read(folder, prefix, comm.worker, [comm.worker.rank] if alone else range(size), strict)
    if alone:  # entries of other ranks are not needed
        others = tuple(f"{prefix}rank{r}/" for r in range(size) if r != comm.worker.rank)
        names = [n for n in names if not n.startswith(others)]
    return [{n.removeprefix(prefix): folder.read(n) for n in names}]


def size_of(folder: Folder, prefix: str) -> int:
    """The number of ranks, or of replicas, that wrote a folder."""
    size = folder.read(f"{prefix}size") if f"{prefix}size" in folder else None
    if not isinstance(size, int):
        raise CheckpointError(
            f"{folder.path} is damaged, or {prefix[:-1]!r} in it is not a communicator: it has no size"
        )
    return size


def check_model(model: nn.Module, then: Mapping[str, Any]) -> None:
    """Raise an error if names or shapes differ, before anything is changed."""
    now = model.state_dict()
    for name in {**now, **then}:
        if name not in then or name not in now:
            where = "the checkpoint" if name not in then else "this model"
            raise CheckpointError(f"the checkpoint is of another model: {name!r} is missing in {where}")
        if getattr(now[name], "shape", None) != getattr(then[name], "shape", None):
            raise CheckpointError(
                f"the checkpoint is of another model: {name!r} was {list(then[name].shape)}, and is {list(now[name].shape)} now"
            )


def put(comm: Communicator, tree: Mapping[str, Any]) -> None:
    """Load model and optimizers from a tree of states."""
    current = comm.model.state_dict()
    current.update(tree["model"])
    comm.model.load_state_dict(current)
    try:
        for optimizer, state in zip(comm.optimizers, tree["optimizer"], strict=True):
            optimizer.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {plainly(error)}") from None


def check_order(order: DataOrder | None, tree: Mapping[str, Any], path: str | Path) -> None:
    if order is not None and ORDER not in tree:
        raise CheckpointError(
            f"{path} was saved without an order: call save(..., order=order) too, or load it without `order` and give the data "
            "another seed, for these samples begin anew"
        )
