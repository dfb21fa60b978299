"""Checkpoints: save a run in one folder for all ranks (format of `torch.distributed.checkpoint`), or one file per rank."""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.checkpoints.folder import Folder, read
from gossamer.core.errors import CheckpointError
from gossamer.core.verbs import MembersChanged
from gossamer.integrations.all_ranks import LABEL, Attached, gathered, on_all
from gossamer.integrations.checkpoint_reading import ORDER, DataOrder, Found, check_order, find, find_public, put
from gossamer.integrations.checkpoint_writing import collect, in_host_memory, writing
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.saving import (
    LANE,
    Saving,
    begin,
    refuse_among_members,
    run_to_its_end,
    save_among_members,
    unfinished,
    written,
)

__all__ = ["Resumed", "Saving", "load", "read", "resume", "save"]


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
        entries = collect(comm, path, extra, order)
        if wait:
            comm.fabric.run(writing(comm, path, entries, "comm"))
            comm.took_to_save(path, time.monotonic() - began, is_over=True)
            return written(path)
        comm.worker.replica.open_lane(LANE)
        copies = in_host_memory(entries)
        comm.saving = begin(comm.fabric, path, writing(comm, path, copies, LANE), comm.step)
        comm.took_to_save(path, time.monotonic() - began, is_over=False)
        return comm.saving


def _save_once(comm: Communicator, path: str | Path, extra: Mapping[str, Any] | None, order: DataOrder | None) -> None:
    """Save among the members that are present now, unless they have saved this very step there: a step that is dropped is
    taken again under its number.
    """
    began = time.monotonic()
    with comm.fabric.during(LABEL, comm.step):
        here = Path(path).resolve(), comm.worker.step
        held = gathered(comm, {"holds": comm._last_checkpoint == here and (Path(path) / ".metadata").is_file()})
        if any(one["holds"] for one in held):
            return
        entries = collect(comm, path, extra, order)
        if comm.members_just_came:  # in the midst of it, and takes the next step meanwhile
            raise MembersChanged("a rank has come in the midst of a save")
        comm._last_checkpoint = here
        writes = writing(comm, path, entries, "comm")
        if comm.is_sharded:  # shards of a node ask one another after each request whether all have its answer
            comm.fabric.run(writes)
        else:
            run_to_its_end(comm.fabric, writes, comm.step)
    comm.took_to_save(path, time.monotonic() - began, is_over=True)


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
    start from the consensus, or from the model that all ranks held, and the mean of the optimizer states; from the mean of the
    ranks' own models where the consensus is another (`eager`, `easgd`, `bmuf(nesterov=True)`). A model that FSDP2 shards is cut
    into this run's shards, from any number of shards; what is not kept by element (the factors of `powersgd`) begins anew then,
    with a warning, or is an error with `strict=True`. From a folder that `dcp.save({"comm": comm, ...}, checkpoint_id=path)`
    wrote, it loads only the communicator or the DDP hook. No code in a checkpoint is ever run.

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

    def look() -> Found:
        folder = Folder(path)
        found = find_public(folder, comm, key) if public_only else find(folder, comm, key, strict)
        check_order(order, found.tree, path)
        return found

    with comm.fabric.during("checkpoint.load", comm.worker.step - 1):
        state, tree = on_all(comm, look)
        if order is not None:  # before anything else changes: it refuses other samples
            on_all(comm, lambda: order.load_state_dict(tree[ORDER]))
        if state is not None:
            on_all(comm, lambda: comm.load_state_dict(state))
        if isinstance(comm, Communicator) and tree:
            put(comm, tree)
        if isinstance(comm, Communicator):
            comm._last_checkpoint = Path(path).resolve(), comm.worker.step
        return tree.get("extra", {})


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
    with comm.fabric.during("checkpoint.resume", comm.step):
        everyone = gathered(comm, on_all(comm, lambda: _held_in(Path(folder))))
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
            try:
                held = Folder(path)
                if "comm.step" in held:
                    steps[path.name] = int(held.read("comm.step"))
            except CheckpointError:  # half deleted, by a job that was killed while it removed old ones
                cut_off.append(path.name)
        elif path.is_dir() and any(path.glob("*.distcp")):
            cut_off.append(path.name)
    return {"steps": steps, "cut off": cut_off}
