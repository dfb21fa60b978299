"""Sidecars: one file per rank beside a trainer's checkpoint, with what the trainer does not save.

A trainer saves one model and one optimizer. Ranks hold more: what they still owe each other, anchors, slow momentum, and under
local and gossip recipes a model and an optimizer of their own. The trainer's files stay the public model: the consensus.
"""

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.checkpoints.folder import read
from gossamer.checkpoints.state import prepare
from gossamer.checkpoints.tree import clear, digest, fill, mean_of_ranks, pack, unpack, with_states_of_all
from gossamer.core.errors import CheckpointError
from gossamer.integrations.all_ranks import gathered, on_all
from gossamer.integrations.checkpoint_reading import trained
from gossamer.integrations.communicator import Communicator

FORMAT = 1


def name_of(rank: int, size: int) -> str:
    """The file of a rank.

    >>> name_of(0, 2)
    'gossamer-rank0-of-2.pt'
    """
    return f"gossamer-rank{rank}-of-{size}.pt"


def remove_older(folder: Path, rank: int, size: int) -> None:
    """Remove the files of an earlier run before a model is saved beside them.

    A save that is cut off must not be taken for a complete one.

    Rank 0 removes those of all ranks, also of another number of them; others their own, in case they do not share the folder.
    """
    for file in folder.glob("gossamer-rank*-of-*.pt"):
        if rank == 0 or file.name == name_of(rank, size):
            file.unlink(missing_ok=True)


def write(comm: Communicator, folder: str | Path) -> None:
    """Write this rank's file into the folder. All ranks call it together, between steps; an error is raised on all of them.

    A file gets its name when it is complete. Files of another number of ranks are removed, since they belong to another save.
    """
    if comm.fabric.members is not None:
        raise CheckpointError("sidecars.write needs all ranks, and under members() some may be lost")
    if comm.is_sharded:
        raise CheckpointError(
            "sidecars.write does not save models that FSDP2 shards: use gossamer.checkpoint.save, which any number of shards can load"
        )
    comm.refuse_to_save("sidecars.write")
    with comm.fabric.during("sidecars.write", comm.step):
        state = comm.state_dict()  # first, for it may end a step
        tree = {"model": _own_model(comm), "optimizer": [o.state_dict() for o in comm.optimizers]}
        tensors = dict[str, Tensor]()
        tensors["frame"] = pack(clear(tree, "", tensors))
        own_is_public = comm._holds_the_consensus()
        answers = gathered(comm, {"step": comm.step, "sum": _sum_of(tensors), "public": own_is_public})
        differ = len({answer["sum"] for answer in answers}) > 1 or not all(answer["public"] for answer in answers)
        stamp = f"step {comm.step}, {blake2b(repr(answers).encode(), digest_size=8).hexdigest()}"
        own = {name: t.cpu() for name, t in tensors.items()} if differ else None
        content = {"format": FORMAT, "stamp": stamp, "comm": state, "own": own}
        on_all(comm, lambda: _put_file(Path(folder), comm, content))


def load(comm: Communicator, folder: str | Path, public_only: bool = False) -> None:
    """Load what `write` wrote, after the trainer has loaded its model and optimizer. All ranks call it together.

    With another number of ranks, all start from the public model, or from the mean of those that train where it is another, and
    the mean of the optimizer states, as after `gossamer.checkpoint.load`. `public_only=True` leaves the sidecars aside: memories
    begin at zero.
    """
    if public_only:
        return
    with comm.fabric.during("sidecars.load", comm.step - 1):
        files = _checked(comm, Path(folder))
        comm.load_state_dict([file["comm"] for file in files])
        own = [file["own"] for file in files]
        if own[0] is not None:
            same_size = files[0]["comm"]["size"] == comm.size
            on_all(comm, lambda: _restore(comm, own, same_size))


def check(comm: Communicator, folder: str | Path) -> None:
    """Raise the errors of `load`, and change nothing. All ranks call it together, before the trainer loads its model."""
    with comm.fabric.during("sidecars.check", comm.step - 1):
        saved = [file["comm"] for file in _checked(comm, Path(folder))]
        on_all(comm, lambda: prepare(comm.worker, saved))


# -- writing -------------------------------------------------------------------------------------------------------


def _put_file(folder: Path, comm: Communicator, content: Mapping[str, Any]) -> None:
    path = folder / name_of(comm.rank, comm.size)
    unfinished = path.with_suffix(".unfinished")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, unfinished)
        os.replace(unfinished, path)
        for other in folder.glob("gossamer-rank*-of-*.pt"):
            if not other.name.endswith(f"-of-{comm.size}.pt"):
                other.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise CheckpointError(f"rank {comm.rank} cannot write {path}: {error}") from None


def _own_model(comm: Communicator) -> dict[str, Any]:
    """The model's state without parameters that gossamer does not train: they are equal on all ranks, such as a base under adapters."""
    every = comm.model.named_parameters(remove_duplicate=False)
    frozen = {name for name, p in every if not p.requires_grad and name not in comm.worker.params}
    return {name: value for name, value in comm.model.state_dict().items() if name not in frozen}


def _sum_of(tensors: Mapping[str, Tensor]) -> str:
    return blake2b(repr({name: digest(t) for name, t in tensors.items()}).encode(), digest_size=16).hexdigest()


# -- loading -------------------------------------------------------------------------------------------------------


def _checked(comm: Communicator, folder: Path) -> list[dict[str, Any]]:
    """The files that this rank needs, of one save and complete on all ranks."""
    files = on_all(comm, lambda: _read(folder, comm))
    _check_stamps(comm, folder, files)
    return files


def _read(folder: Path, comm: Communicator) -> list[dict[str, Any]]:
    """This rank's file; the files of all old ranks if their number was another."""
    sizes = sorted({int(path.stem.rpartition("-of-")[2]) for path in folder.glob("gossamer-rank*-of-*.pt")})
    ways = "To go on from the trainer's model alone, with memories that begin at zero, pass public_only=True"
    if not sizes:
        raise CheckpointError(
            f"rank {comm.rank}: {folder} has no file {name_of(comm.rank, comm.size)}: it was saved without gossamer, or its save was cut "
            f"off, or this machine does not see the folder that rank {comm.rank} saved to. {ways}"
        )
    size = comm.size if comm.size in sizes else sizes[-1]
    wanted = [comm.rank] if size == comm.size else range(size)
    missing = [name_of(r, size) for r in wanted if not (folder / name_of(r, size)).is_file()]
    if missing:
        raise CheckpointError(
            f"rank {comm.rank}: {folder} is incomplete: {', '.join(missing)} is missing. The save was cut off, or the ranks do not share "
            f"this folder: load the checkpoint before it, or copy the files of all ranks here. {ways}"
        )
    files = [read(folder / name_of(r, size)) for r in wanted]
    for rank, file in zip(wanted, files, strict=True):
        if not isinstance(file, dict) or file.get("format") != FORMAT:
            raise CheckpointError(f"{folder / name_of(rank, size)} was not written by this version of gossamer")
    return files


def _check_stamps(comm: Communicator, folder: Path, files: list[dict[str, Any]]) -> None:
    stamps = {
        stamp for answer in gathered(comm, {"stamps": [file["stamp"] for file in files]}) for stamp in answer["stamps"]
    }
    if len(stamps) > 1:
        raise CheckpointError(
            f"the files gossamer-rank*.pt in {folder} are of different saves ({', '.join(sorted(stamps))}): load another checkpoint"
        )


def _restore(comm: Communicator, own: list[dict[str, Tensor]], same_size: bool) -> None:
    """Load this rank's own model and optimizers; of another number of ranks, the mean of the optimizers."""

    def find(name: str) -> Tensor:
        held = [tensors[name] for tensors in own if name in tensors]
        return held[0] if len(own) == 1 else mean_of_ranks(held, len(own))

    tree = fill(with_states_of_all([unpack(tensors["frame"]) for tensors in own]), find)
    if same_size:
        comm.model.load_state_dict(tree["model"], strict=False)  # frozen parameters are not in it
    elif comm.recipe.schedule.shape.evaluates_another:  # the public model is none that trained
        ours = trained(comm)
        means = {name: t for name, t in tree["model"].items() if f"model/{name}" in ours}
        comm.model.load_state_dict(means, strict=False)
    for optimizer, state in zip(comm.optimizers, tree["optimizer"], strict=True):
        optimizer.load_state_dict(state)
