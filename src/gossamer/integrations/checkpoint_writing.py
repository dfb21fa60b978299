"""What each rank writes into a folder of `checkpoint.save`: what is equal on all ranks once, and what is its own."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.checkpoints import sharded
from gossamer.checkpoints.chunks import Chunk, box_of, is_cut
from gossamer.checkpoints.folder import write
from gossamer.checkpoints.tree import clear, digest, pack, place_of
from gossamer.core.errors import CheckpointError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.verbs import Program
from gossamer.integrations.all_ranks import facts_of_all, gathered
from gossamer.integrations.checkpoint_reading import ORDER, DataOrder, trained
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.held_model import parts_of_parameters
from gossamer.runtime import local_part

Entries = dict[str, dict[str, Any]]  # tensors, chunks of tensors and plain values, by section and name


def collect(comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None, order: DataOrder | None) -> Entries:
    """Return the entries that this rank writes, by section."""
    kept = comm._state_to_save()  # first, for it may end a step
    parts_of_parameters(comm.model)  # FSDP2 shards the parameters again, if a forward pass has gathered them
    optimizers = [optimizer.state_dict() for optimizer in comm.optimizers]
    tree = {"model": comm.model.state_dict(), "optimizer": optimizers, "extra": dict(extra or {})}
    if order is not None:
        tree[ORDER] = order.state_dict()
    tensors, problem = dict[str, Tensor](), ""
    cleared = clear(tree, "", tensors)
    try:
        tensors["frame"] = pack(cleared)
    except CheckpointError as error:
        problem = str(error)
    sums = {name: digest(local_part(t)) for name, t in tensors.items()}
    taken, holds = (Path(path) / ".metadata").exists(), comm._holds_the_consensus()
    everyone = gathered(comm, {"step": comm.step, "sums": sums, "taken": taken, "holds": holds, "problem": problem})
    _check_together(everyone, path)
    equal = _equal(tensors, [answer["sums"] for answer in everyone], comm.worker.replica.size)
    if isinstance(comm.recipe.schedule, TrainsElsewhere):  # the stored `model` is then not the model that trains
        equal -= {name for name in equal if name.startswith("model/")}
    # Equal on all ranks, but not what is evaluated, such as a model with a look-ahead.
    ahead = set[str]() if all(answer["holds"] for answer in everyone) else equal & trained(comm)
    public = {name.removeprefix("model/"): tensors[name] for name in equal - ahead if name.startswith("model/")}
    model = _consensus(comm, public)
    if comm.worker.rank == 0:
        sums |= {f"consensus/{name}": digest(local_part(t)) for name, t in model.items()}
    by_shard = place_of(comm.worker.rank, comm.worker.replica.index, comm.worker.replica.size)
    own = dict[str, Any]()
    for name, t in tensors.items():
        if name not in equal:
            own[_place(comm, t, by_shard) + name] = _stored(t, comm)
        elif _writes_for_all(comm, t) and (name in ahead or not name.startswith("model/")):
            own[f"equal/{name}"] = _stored(t, comm)
    own[f"{by_shard}contents"] = json.dumps(sums)
    written = {name: _stored(t, comm) for name, t in model.items() if _writes_for_all(comm, t)}
    kept = kept if comm.worker.replica.size == 1 else sharded.entries(kept, comm.worker)
    return {"comm": kept, "own": own} | ({"model": written} if written else {})


def _check_together(everyone: list[dict[str, Any]], path: str | Path) -> None:
    """Raise an error if ranks are at different steps, one of them cannot be saved, or the folder holds a checkpoint."""
    steps = [reply["step"] for reply in everyone]
    for rank, reply in enumerate(everyone):
        if reply["problem"]:
            raise CheckpointError(f"rank {rank} cannot save to {path}: {reply['problem']}")
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks are at steps {steps}; save when all ranks are at the same step")
    if any(reply["taken"] for reply in everyone):
        raise CheckpointError(
            f"{path} holds a checkpoint already; save each checkpoint to its own folder, such as step{steps[0]}"
        )


def _equal(tensors: Mapping[str, Tensor], sums: list[dict[str, str]], shards: int) -> set[str]:
    """The names of tensors that are equal on all ranks; those that are cut, on all ranks with the same shard."""
    groups = [sums[shard::shards] for shard in range(shards)]
    return {
        name
        for name, t in tensors.items()
        if all(len({one.get(name) for one in group}) == 1 for group in (groups if is_cut(t) else [sums]))
    }


def _consensus(comm: Communicator, equal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the consensus model; those that are `equal` on all ranks are used as they are."""
    own = {name: t for name, t in comm.model.state_dict().items() if isinstance(t, Tensor)}
    if own.keys() == equal.keys():
        return own
    with comm.consensus():
        agreed = comm.model.state_dict()
        return {name: equal[name] if name in equal else agreed[name].detach().clone() for name in own}


def _stored(tensor: Tensor, comm: Communicator) -> Any:
    """A tensor as it is written: a chunk where other ranks of the replica write the rest of it."""
    whole = comm.worker.replica.size == 1 or not is_cut(tensor)
    return local_part(tensor) if whole else Chunk(local_part(tensor), box_of(tensor))


def _writes_for_all(comm: Communicator, tensor: Tensor) -> bool:
    """True if this rank writes what is equal on all ranks: its part of it, where it is cut."""
    return comm.worker.rank == 0 and (comm.worker.replica.index == 0 or is_cut(tensor))


def _place(comm: Communicator, tensor: Tensor, by_shard: str) -> str:
    """Where a replica's own tensor is written."""
    return f"replica{comm.worker.rank}/" if comm.worker.replica.size > 1 and is_cut(tensor) else by_shard


def in_host_memory(entries: Entries) -> Entries:
    """Copy all tensors of the model and the optimizers, which training changes; the communicator's are copies already."""
    return {
        section: held if section == "comm" else {name: _copied(value) for name, value in held.items()}
        for section, held in entries.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Chunk):
        return Chunk(_copied(value.data), value.box)
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def writing(comm: Communicator, path: str | Path, entries: Entries, lane: str) -> Program[None]:
    """The program in which all ranks write their entries together."""
    replica = comm.worker.replica
    number = comm.worker.rank * replica.size + replica.index
    return write(path, entries, number, partial(facts_of_all, comm, lane=lane, step=comm.step))
