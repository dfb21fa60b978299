"""Saving under `members()`: those who are present write one checkpoint, also where one of them dies meanwhile."""

import warnings
from collections.abc import Callable
from pathlib import Path

from gossamer.core.errors import CheckpointError
from gossamer.core.schedule import Elastic
from gossamer.core.verbs import MembersChanged
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.saving import Saving, written


def refuse_among_members(comm: Communicator, wait: bool) -> None:
    """Raise an error for what cannot be saved together."""
    if isinstance(comm.recipe.schedule, Elastic):
        raise CheckpointError(
            f"checkpoint.save under members() with {comm.recipe}: its ranks are never at one step; save one file per rank, "
            "torch.save({'model': model.state_dict(), 'optimizer': optimizer.state_dict()}, ...)"
        )
    if not wait:
        raise CheckpointError(
            "checkpoint.save(wait=False) under members(): a comm thread of its own would have to be opened on ranks that come later; "
            "leave wait out"
        )


def save_among_members(comm: Communicator, path: str | Path, attempt: Callable[[], None]) -> Saving:
    """Run `attempt`, and once more among those who are left where a rank was lost meanwhile."""
    while True:
        if why := _passes_by(comm):
            return _passed_by(comm, path, why)
        try:
            attempt()
        except MembersChanged:
            continue
        return written(path)


def _passes_by(comm: Communicator) -> str:
    """Why this rank does not save now; all ranks that were at work before agree on it."""
    if comm.has_left:
        return "it has left the members, and the others have what it owed: they save"
    if comm.members_just_came:
        return "a rank has come since the last step, and is not where the others save; the next save is whole"
    return ""


def _passed_by(comm: Communicator, path: str | Path, why: str) -> Saving:
    said = f"rank {comm.rank}, step {comm.step}: nothing was saved to {path}, since {why}"
    warnings.warn(said, RuntimeWarning, stacklevel=4)
    return Saving(path, lambda: CheckpointError(said), lambda: True)
