"""Checkpoints: save a run in one folder for all ranks (format of `torch.distributed.checkpoint`), or one file per rank."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from gossamer.checkpoints.folder import Folder, read, write
from gossamer.checkpoints.manifest import cut
from gossamer.checkpoints.tree import Saved, clear, digest, pack
from gossamer.core.errors import CheckpointError, plainly
from gossamer.core.schedule import TrainsElsewhere
from gossamer.core.verbs import Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.handshake import tell
from gossamer.integrations.saving import LABEL, Saving, begin, unfinished, written
from gossamer.runtime import Worker

__all__ = ["Saving", "load", "read", "save"]

LIMIT = 2**30  # bytes of a rank's list of tensors


class Attached(Protocol):
    """A communicator, or the hook of a DDP model."""

    worker: Worker
    fabric: TorchFabric

    def load_state_dict(self, saved: Any) -> None: ...


def save(
    comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None = None, *, wait: bool = True
) -> Saving:
    """Save model, optimizer, communicator and `extra` into a new folder; call it on all ranks, between steps.

    Entries that are equal on all ranks are stored once; entries that differ (under local and gossip recipes) are stored per
    rank, so that `load` continues exactly. The entry `model` is the consensus: use it to evaluate or to publish.

    With `wait=False` it returns when all is copied to the host's memory, and a thread writes while training goes on:
    `saving = gossamer.checkpoint.save(comm, path, wait=False)`. At most one is under way: the next save waits for it.
    """
    if comm.fabric.members is not None:
        raise CheckpointError(
            "checkpoint.save needs all ranks, and under members() some may be lost: save one file per rank, "
            "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict(), 'comm': comm.state_dict()}, ...)"
        )
    if apart := comm.apart():
        raise CheckpointError(f"checkpoint.save needs all ranks at the same step, and {apart}")
    comm.settle_saving()
    with comm.fabric.during(LABEL, comm.step), unfinished(path):
        entries = _collect(comm, path, extra)
        if wait:
            comm.fabric.run(_write(comm, path, entries))
            return written(path)
        copies = _in_host_memory(entries)
        comm.saving = begin(comm.fabric, path, _write(comm, path, copies), comm.step)
        return comm.saving


def load(comm: Attached, path: str | Path, key: str = "comm") -> dict[str, Any]:
    """Load what `save` wrote, also with another number of ranks; return its `extra`.

    Attach first. All ranks call it together; if it fails on one rank it fails on all. With another number of ranks, all
    start from the consensus and the mean of the optimizer states. From a folder that
    `dcp.save({"comm": comm, ...}, checkpoint_id=path)` wrote, it loads only the communicator or the DDP hook. No code in a
    checkpoint is ever run.
    """
    if isinstance(comm, Communicator):
        comm.settle_saving()
    with comm.fabric.during("checkpoint.load", comm.worker.step - 1):
        return _load(comm, path, key)


# -- saving --------------------------------------------------------------------------------------------------------


def _collect(comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Return the entries that this rank writes, by section."""
    state = comm.state_dict()  # first, for it may end a step
    optimizers = [optimizer.state_dict() for optimizer in comm.optimizers]
    tree = {"model": comm.model.state_dict(), "optimizer": optimizers, "extra": dict(extra or {})}
    tensors = dict[str, Tensor]()
    tensors["frame"] = pack(clear(tree, "", tensors))
    sums = {name: digest(t) for name, t in tensors.items()}
    everyone = _gathered(comm, {"step": comm.step, "sums": sums, "taken": (Path(path) / ".metadata").exists()})
    _check_together(everyone, path)
    equal = {name for name in sums if all(other["sums"].get(name) == sums[name] for other in everyone)}
    if isinstance(comm.recipe.schedule, TrainsElsewhere):  # the stored `model` is then not the model that trains
        equal -= {name for name in equal if name.startswith("model/")}
    model = _consensus(
        comm, {name.removeprefix("model/"): tensors[name] for name in equal if name.startswith("model/")}
    )
    own: dict[str, Any] = {f"rank{comm.rank}/{name}": t for name, t in tensors.items() if name not in equal}
    if comm.rank == 0:
        own |= {f"equal/{name}": tensors[name] for name in equal if not name.startswith("model/")}
        sums |= {f"consensus/{name}": digest(t) for name, t in model.items()}
    own[f"rank{comm.rank}/contents"] = json.dumps(sums)
    return {"comm": state, "own": own} | ({"model": model} if comm.rank == 0 else {})


def _in_host_memory(entries: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copy all tensors of the model and the optimizers, which training changes; the communicator's are copies already."""
    return {
        section: held
        if section == "comm"
        else {name: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for name, value in held.items()}
        for section, held in entries.items()
    }


def _write(comm: Communicator, path: str | Path, entries: dict[str, dict[str, Any]]) -> Program[None]:
    return write(path, entries, comm.rank, partial(_told, comm))


def _gathered(comm: Attached, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of all ranks, in rank order."""
    return comm.fabric.run(_told(comm, facts))


def _told(comm: Attached, facts: dict[str, Any]) -> Program[list[dict[str, Any]]]:
    if comm.fabric.size == 1:
        return [facts]
    return (yield from tell(facts, comm.worker.device, LIMIT))


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


def _load(comm: Attached, path: str | Path, key: str) -> dict[str, Any]:
    state, tree = dict[str, Any](), dict[str, Any]()

    def look() -> None:
        nonlocal state, tree
        folder = Folder(path)
        state = _communicator(folder, f"{key}.", comm)
        if isinstance(comm, Communicator) and "own.rank0/contents" in folder:
            tree = Saved(folder, int(state["size"]), comm.rank, comm.size).tree()
            _check_model(comm.model, tree["model"])

    _together(comm, look)
    _together(comm, lambda: comm.load_state_dict(state))
    if isinstance(comm, Communicator) and tree:
        _put(comm, tree)
    return tree.get("extra", {})


def _together(comm: Attached, do: Callable[[], None]) -> None:
    """Run `do`; if it fails on one rank, raise an error on all ranks."""
    problem = ""
    try:
        do()
    except CheckpointError as error:
        problem = str(error)
    for rank, reply in enumerate(_gathered(comm, {"problem": problem[:2000]})):
        if problem or reply["problem"]:
            raise CheckpointError(problem or f"rank {rank}: {reply['problem']}")


def _communicator(folder: Folder, prefix: str, comm: Attached) -> dict[str, Any]:
    """Read the communicator's entries, and only those that this rank needs."""
    names = [n for n in folder if n.startswith(prefix)]
    if not names:
        held = sorted({n.split(".")[0] for n in folder})
        raise CheckpointError(f"{folder.path} holds nothing under {prefix[:-1]!r}; it was saved under {held}")
    size = folder.read(f"{prefix}size") if f"{prefix}size" in folder else None
    if not isinstance(size, int):
        raise CheckpointError(
            f"{folder.path} is damaged, or {prefix[:-1]!r} in it is not a communicator: it has no size"
        )
    cut_alike = f"{prefix}cut" in folder and folder.read(f"{prefix}cut") == json.dumps(cut(comm.worker.buckets))
    in_shards = comm.worker.recipe.schedule.policy("anchor") == "shard"
    if size == comm.fabric.size and (cut_alike or not in_shards):  # entries of other ranks are not needed
        others = tuple(f"{prefix}rank{r}/" for r in range(size) if r != comm.fabric.rank)
        names = [n for n in names if not n.startswith(others)]
    return {n.removeprefix(prefix): folder.read(n) for n in names}


def _check_model(model: nn.Module, then: Mapping[str, Any]) -> None:
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


def _put(comm: Communicator, tree: Mapping[str, Any]) -> None:
    """Load model and optimizers from a tree of states."""
    current = comm.model.state_dict()
    current.update(tree["model"])
    comm.model.load_state_dict(current)
    try:
        for optimizer, state in zip(comm.optimizers, tree["optimizer"], strict=True):
            optimizer.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"the checkpoint's optimizer does not fit this one: {plainly(error)}") from None
