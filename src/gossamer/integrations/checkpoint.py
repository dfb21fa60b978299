"""Checkpoints: save a run in one folder for all ranks (format of `torch.distributed.checkpoint`), or one file per rank."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.checkpoints import sharded, state
from gossamer.checkpoints.chunks import Chunk, box_of, is_cut
from gossamer.checkpoints.folder import Folder, read, write
from gossamer.checkpoints.tree import clear, digest, pack
from gossamer.core.errors import CheckpointError, PeerError
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.verbs import MembersChanged, Program
from gossamer.integrations.checkpoint_reading import (
    ORDER,
    Attached,
    DataOrder,
    check_model,
    check_order,
    communicator_of,
    put,
    size_of,
    tree_of,
)
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.handshake import tell
from gossamer.integrations.held_model import parts_of_parameters
from gossamer.integrations.saving import (
    LABEL,
    LANE,
    Saving,
    begin,
    refuse_among_members,
    run_to_its_end,
    save_among_members,
    unfinished,
    written,
)
from gossamer.runtime import local_part

__all__ = ["Resumed", "Saving", "load", "read", "resume", "save"]

LIMIT = 2**30  # bytes of a rank's list of tensors


def save(
    comm: Communicator,
    path: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    order: DataOrder | None = None,
    wait: bool = True,
) -> Saving:
    """Save model, optimizer, communicator, `order` and `extra` into a new folder; call it on all ranks, between steps.

    Entries that are equal on all ranks are stored once; entries that differ (under local and gossip recipes) are stored per
    rank, so that `load` continues exactly. The entry `model` is the consensus: use it to evaluate or to publish.

    With `wait=False` it returns when all is copied to the host's memory, and a thread writes while training goes on:
    `saving = gossamer.checkpoint.save(comm, path, wait=False)`. At most one is under way: the next save waits for it.

    Under `members()` those who are present write, at one step. Where a rank dies meanwhile the others write anew, without it; where
    one has just come they save nothing, with a warning, for it is not there.
    """
    comm.refuse_to_save("checkpoint.save")
    comm.settle_saving()
    if comm.fabric.members is not None:
        refuse_among_members(comm, wait)
        return save_among_members(comm, path, partial(_save_once, comm, path, extra, order))
    began = time.monotonic()
    with comm.fabric.during(LABEL, comm.step), unfinished(path):
        entries = _collect(comm, path, extra, order)
        if wait:
            comm.fabric.run(_write(comm, path, entries, "comm"))
            comm.took_to_save(path, time.monotonic() - began, is_over=True)
            return written(path)
        comm.worker.replica.open_lane(LANE)
        copies = _in_host_memory(entries)
        comm.saving = begin(comm.fabric, path, _write(comm, path, copies, LANE), comm.step)
        comm.took_to_save(path, time.monotonic() - began, is_over=False)
        return comm.saving


def _save_once(comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None, order: DataOrder | None) -> None:
    """Save among the members that are present now, unless they have saved this very step there: a step that is dropped is
    taken again under its number.
    """
    began = time.monotonic()
    with comm.fabric.during(LABEL, comm.step):
        held = gathered(comm, {"holds": _step_in(Path(path))})
        if any(one["holds"] == comm.worker.step for one in held):
            return
        entries = _collect(comm, path, extra, order)
        writes = _write(comm, path, entries, "comm")
        if comm.is_sharded:  # shards of a node ask one another after each request whether all have its answer
            comm.fabric.run(writes)
        else:
            run_to_its_end(comm.fabric, writes, comm.step)
    comm.took_to_save(path, time.monotonic() - began, is_over=True)


def _step_in(path: Path) -> int | None:
    """The step of the complete checkpoint in a folder, if there is one."""
    return int(Folder(path).read("comm.step")) if (path / ".metadata").is_file() else None


def load(
    comm: Attached,
    path: str | Path,
    key: str = "comm",
    *,
    order: DataOrder | None = None,
    strict: bool = False,
    public_only: bool = False,
) -> dict[str, Any]:
    """Load what `save` wrote, also with another number of ranks; return its `extra`.

    Attach first. All ranks call it together; if it fails on one rank it fails on all. With another number of ranks, all
    start from the consensus and the mean of the optimizer states. A model that FSDP2 shards is cut into this run's shards,
    from any number of shards; what is not kept by element (the factors of `powersgd`) begins anew then, with a warning, or
    is an error with `strict=True`. From a folder that
    `dcp.save({"comm": comm, ...}, checkpoint_id=path)` wrote, it loads only the communicator or the DDP hook. No code in a
    checkpoint is ever run.

    `public_only=True` goes on with another recipe: from the consensus and the mean of the optimizer states, with memories and
    steps that begin at zero.
    """
    if isinstance(comm, Communicator):
        comm.settle_saving()
    if comm.worker.ranks.present.joins:
        raise CheckpointError(
            f"rank {comm.fabric.rank} has come to members that are at work, and has their state already: load a checkpoint where all "
            "start together, or call checkpoint.resume, which loads none here"
        )
    with comm.fabric.during("checkpoint.load", comm.worker.step - 1):
        if public_only:
            return _load_public(comm, path, key, order)
        return _load(comm, path, key, order, strict)


class Resumed(NamedTuple):
    """What `resume` has loaded; as text, a sentence that says it.

    >>> print(Resumed("runs/7", None, {}, ("step20",)))
    runs/7 holds no complete checkpoint, so training begins anew; passed over, since their saves were cut off: step20
    """

    folder: str
    name: str | None  # of the checkpoint in the folder; None: there was no complete one
    extra: dict[str, Any]  # as it was given to `save`
    cut_off: tuple[str, ...]  # checkpoints whose saves did not end
    joined: bool = False  # True if this rank came to members at work, who gave it their state: nothing was loaded

    def __str__(self) -> str:
        if self.joined:
            return f"came to others that are at work, and has their state: nothing was loaded from {self.folder}"
        found = f"resumed from {self.folder}/{self.name}"
        none = f"{self.folder} holds no complete checkpoint, so training begins anew"
        passed = f"; passed over, since their saves were cut off: {', '.join(self.cut_off)}" if self.cut_off else ""
        return (none if self.name is None else found) + passed


def resume(comm: Communicator, folder: str | Path, *, order: DataOrder | None = None, strict: bool = False) -> Resumed:
    """Load the newest complete checkpoint of a folder that holds one folder per `save`, or none if there is none.

    Newest is the one of the highest step, whatever its name. A save that was cut off is passed over. Call it on all ranks,
    after `attach`; a folder that not all ranks see is an error on all of them. Under `members()` a rank that comes to others at
    work loads nothing: it has their state.
    """
    if comm.worker.ranks.present.joins:
        return Resumed(str(folder), None, {}, (), joined=True)
    held = dict[str, Any]()
    with comm.fabric.during("checkpoint.resume", comm.step):
        _together(comm, lambda: held.update(_held_in(Path(folder))))
        everyone = gathered(comm, held)
    seen = [set[str](facts["steps"]) for facts in everyone]
    if any(names != seen[0] for names in seen):
        missing = {rank: set.union(*seen) - names for rank, names in enumerate(seen)}
        raise CheckpointError(
            f"the ranks do not see the same checkpoints in {folder}: "
            + "; ".join(f"rank {rank} lacks {', '.join(sorted(names))}" for rank, names in missing.items() if names)
            + ". Give all ranks one folder on a disk that all of them see"
        )
    newest = max(everyone[0]["steps"].items(), key=lambda one: one[1], default=(None,))[0]
    extra = {} if newest is None else load(comm, Path(folder) / newest, order=order, strict=strict)
    return Resumed(str(folder), newest, extra, tuple(everyone[0]["cut off"]))


def _held_in(folder: Path) -> dict[str, Any]:
    """The steps of the complete checkpoints in a folder, by name, and the names of those whose saves were cut off."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: pass the one in which each save has its own")
    steps, cut_off = dict[str, int](), list[str]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / ".metadata").is_file():
            held = Folder(path)
            if "comm.step" in held:
                steps[path.name] = int(held.read("comm.step"))
        elif path.is_dir() and any(path.glob("*.distcp")):
            cut_off.append(path.name)
    return {"steps": steps, "cut off": cut_off}


# -- saving --------------------------------------------------------------------------------------------------------


def _collect(
    comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None, order: DataOrder | None
) -> dict[str, dict[str, Any]]:
    """Return the entries that this rank writes, by section."""
    kept = comm.state_dict()  # first, for it may end a step
    parts_of_parameters(comm.model)  # FSDP2 shards the parameters again, if a forward pass has gathered them
    optimizers = [optimizer.state_dict() for optimizer in comm.optimizers]
    tree = {"model": comm.model.state_dict(), "optimizer": optimizers, "extra": dict(extra or {})}
    if order is not None:
        tree[ORDER] = order.state_dict()
    tensors = dict[str, Tensor]()
    tensors["frame"] = pack(clear(tree, "", tensors))
    sums = {name: digest(local_part(t)) for name, t in tensors.items()}
    everyone = gathered(comm, {"step": comm.step, "sums": sums, "taken": (Path(path) / ".metadata").exists()})
    _check_together(everyone, path)
    equal = _equal(tensors, [answer["sums"] for answer in everyone], comm.worker.replica.size)
    if isinstance(comm.recipe.schedule, TrainsElsewhere):  # the stored `model` is then not the model that trains
        equal -= {name for name in equal if name.startswith("model/")}
    model = _consensus(
        comm, {name.removeprefix("model/"): tensors[name] for name in equal if name.startswith("model/")}
    )
    if comm.worker.rank == 0:
        sums |= {f"consensus/{name}": digest(local_part(t)) for name, t in model.items()}
    replica = comm.worker.replica
    own = dict[str, Any]()
    for name, t in tensors.items():
        if name not in equal:
            own |= {_place(comm, t) + name: _stored(t, comm)}
        elif _writes_for_all(comm, t) and not name.startswith("model/"):
            own |= {f"equal/{name}": _stored(t, comm)}
    own[_by_shard(comm) + "contents"] = json.dumps(sums)
    public = {name: _stored(t, comm) for name, t in model.items() if _writes_for_all(comm, t)}
    kept = kept if replica.size == 1 else sharded.entries(kept, comm.worker)
    return {"comm": kept, "own": own} | ({"model": public} if public else {})


def _equal(tensors: Mapping[str, Tensor], sums: list[dict[str, str]], shards: int) -> set[str]:
    """The names of tensors that are equal on all ranks; those that are cut, on all ranks with the same shard."""
    groups = [sums[shard::shards] for shard in range(shards)]
    return {
        name
        for name, t in tensors.items()
        if all(len({one.get(name) for one in group}) == 1 for group in (groups if is_cut(t) else [sums]))
    }


def _stored(tensor: Tensor, comm: Communicator) -> Any:
    """A tensor as it is written: a chunk where other ranks of the replica write the rest of it."""
    whole = comm.worker.replica.size == 1 or not is_cut(tensor)
    return local_part(tensor) if whole else Chunk(local_part(tensor), box_of(tensor))


def _writes_for_all(comm: Communicator, tensor: Tensor) -> bool:
    """True if this rank writes what is equal on all ranks: its part of it, where it is cut."""
    return comm.worker.rank == 0 and (comm.worker.replica.index == 0 or is_cut(tensor))


def _place(comm: Communicator, tensor: Tensor) -> str:
    """Where a replica's own tensor is written."""
    return f"replica{comm.worker.rank}/" if comm.worker.replica.size > 1 and is_cut(tensor) else _by_shard(comm)


def _by_shard(comm: Communicator) -> str:
    """Where a rank's own values are written."""
    replica = comm.worker.replica
    return f"rank{comm.worker.rank}/" if replica.size == 1 else f"replica{comm.worker.rank}/shard{replica.index}/"


def _in_host_memory(entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copy all tensors of the model and the optimizers, which training changes; the communicator's are copies already."""
    return {
        section: held if section == "comm" else {name: _copied(value) for name, value in held.items()}
        for section, held in entries.items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, Chunk):
        return Chunk(_copied(value.data), value.box)
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value


def _write(comm: Communicator, path: str | Path, entries: dict[str, dict[str, Any]], lane: str) -> Program[None]:
    replica = comm.worker.replica
    number = comm.worker.rank * replica.size + replica.index
    return write(path, entries, number, partial(_told, comm, lane=lane, step=comm.step))


def gathered(comm: Attached, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of all ranks: replica by replica, and in each shard by shard."""
    return comm.fabric.run(_told(comm, facts, "comm", comm.worker.step - 1))


def _told(comm: Attached, facts: dict[str, Any], lane: str, step: int) -> Program[list[dict[str, Any]]]:
    replica = comm.worker.replica
    try:
        same_shard = yield from comm.worker.jointly(_told_by_same_shard(comm, facts))
    except MembersChanged:
        raise
    except PeerError:
        replica.close()  # other shards wait for this one, which cannot answer any more
        raise
    by_shard = replica.told(same_shard, LABEL, step, lane)
    return [shard[rank] for rank in range(len(same_shard)) for shard in by_shard]


def _told_by_same_shard(comm: Attached, facts: dict[str, Any]) -> Program[list[dict[str, Any]]]:
    return [facts] if comm.worker.size == 1 else (yield from tell(facts, comm.worker.device, LIMIT))


def _check_together(everyone: list[dict[str, Any]], path: str | Path) -> None:
    """Raise an error if ranks are at different steps, or the folder holds a checkpoint."""
    steps = [reply["step"] for reply in everyone]
    if len(set(steps)) > 1:
        raise CheckpointError(f"the ranks are at steps {steps}; save when all ranks are at the same step")
    if any(reply["taken"] for reply in everyone):
        raise CheckpointError(
            f"{path} holds a checkpoint already; save each checkpoint to its own folder, such as step{steps[0]}"
        )


def _consensus(comm: Communicator, equal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the consensus model; those that are `equal` on all ranks are used as they are."""
    own = {name: t for name, t in comm.model.state_dict().items() if isinstance(t, Tensor)}
    if own.keys() == equal.keys():
        return own
    with comm.consensus():
        agreed = comm.model.state_dict()
        return {name: equal[name] if name in equal else agreed[name].detach().clone() for name in own}


# -- loading -------------------------------------------------------------------------------------------------------


def _load(comm: Attached, path: str | Path, key: str, order: DataOrder | None, strict: bool) -> dict[str, Any]:
    found, tree = list[dict[str, Any]](), dict[str, Any]()

    def look() -> None:
        nonlocal found, tree
        folder = Folder(path)
        found = communicator_of(folder, f"{key}.", comm, strict)
        if comm.worker.replica.size > 1:  # shards agree before any of them changes
            state.prepare(comm.worker, found)
        shards = sharded.shards_of(folder, f"{key}.")
        first = "own.rank0/contents" if shards == 1 else "own.replica0/shard0/contents"
        if isinstance(comm, Communicator) and first in folder:
            tree = tree_of(folder, int(found[0]["size"]), shards, comm)
            check_model(comm.model, tree["model"])
        check_order(order, tree, path)

    _together(comm, look)
    if order is not None:  # before anything else changes: it refuses other samples
        _together(comm, lambda: order.load_state_dict(tree[ORDER]))
    _together(comm, lambda: comm.load_state_dict(found))
    if isinstance(comm, Communicator) and tree:
        put(comm, tree)
    return tree.get("extra", {})


def _load_public(comm: Attached, path: str | Path, key: str, order: DataOrder | None) -> dict[str, Any]:
    """Load what belongs to no rank: the consensus, the mean of the optimizer states, the order of the data and `extra`."""
    tree = dict[str, Any]()

    def look() -> None:
        folder = Folder(path)
        if not isinstance(comm, Communicator) or not any(name.startswith("own.") for name in folder):
            raise CheckpointError(
                f"public_only=True takes the model and the optimizer from {path}, and needs what gossamer.checkpoint.save() has "
                "written of a model that gossamer.attach() has attached"
            )
        if comm.step:
            raise CheckpointError(
                f"public_only=True begins with memories at zero, but {comm.step} steps were taken already: load before the first"
            )
        tree.update(tree_of(folder, size_of(folder, f"{key}."), sharded.shards_of(folder, f"{key}."), comm, ranks=0))
        check_model(comm.model, tree["model"])
        check_order(order, tree, path)

    _together(comm, look)
    if order is not None:
        _together(comm, lambda: order.load_state_dict(tree[ORDER]))
    assert isinstance(comm, Communicator)
    put(comm, tree)
    return tree.get("extra", {})


def _together(comm: Attached, do: Callable[[], None]) -> None:
    """Run `do`; if it fails on one rank, raise an error on all ranks."""
    problem = ""
    try:
        do()
    except CheckpointError as error:
        problem = str(error)
    for rank, reply in enumerate(gathered(comm, {"problem": problem[:2000]})):
        if problem or reply["problem"]:
            raise CheckpointError(problem or f"rank {rank}: {reply['problem']}")
