"""Saving: a checkpoint that all ranks write while training goes on, and how its end is waited for."""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from gossamer.core.errors import CheckpointError, PeerError
from gossamer.core.schedule import Elastic
from gossamer.core.verbs import Handle, MembersChanged, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.all_ranks import LABEL

if TYPE_CHECKING:
    from gossamer.integrations.communicator import Communicator

LANE = "checkpoint"  # the comm thread that writes, with a group of its own


@final
class Saving:
    """A checkpoint under way, as `gossamer.checkpoint.save(..., wait=False)` returns it.

    Training may go on: everything was copied. `comm.finish()`, `comm.detach()` and the next save or load wait for it, and raise
    its error where `wait()` has not raised it before.
    """

    def __init__(self, path: str | Path, end: Callable[[], CheckpointError | None], done: Callable[[], bool]) -> None:
        self.path = Path(path)
        self._end, self._done = end, done
        self._reported = False

    def done(self) -> bool:
        """True if `wait()` would not block."""
        return self._done()

    def wait(self) -> None:
        """Wait until all ranks have written. What fails on one rank raises an error on all of them, each time it is asked for."""
        self._reported = True
        with unfinished(self.path):
            failure = self._end()
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait as `wait` does, unless its caller has seen the end already."""
        if not self._reported:
            self.wait()


def written(path: str | Path) -> Saving:
    """A checkpoint that is complete."""
    return Saving(path, lambda: None, lambda: True)


def begin(fabric: TorchFabric, path: str | Path, program: Program[None], step: int) -> Saving:
    """Write on a comm thread; all ranks call this together."""
    if not fabric.has_lane(LANE):
        fabric.open_lane(LANE, served=True)  # served: through the host's memory, also over NCCL
    handle: Handle[CheckpointError | None] = fabric.start(_returning(program), LABEL, step, LANE)
    return Saving(path, lambda: fabric.join(handle), handle.done)


def run_to_its_end(fabric: TorchFabric, program: Program[None], step: int) -> None:
    """Write on the comm thread of all else, as one task: where a rank dies meanwhile, it is complete on all others, or on none."""
    failure = fabric.join(fabric.start(_returning(program), LABEL, step))
    if failure is not None:
        raise failure


def _returning(program: Program[None]) -> Program[CheckpointError | None]:
    """Return a CheckpointError instead of raising it, which would end the comm thread: the next save may succeed."""
    try:
        yield from program
    except CheckpointError as error:
        return error
    return None


@contextmanager
def unfinished(path: str | Path) -> Generator[None, Any, None]:
    """Add to a PeerError what is left on disk."""
    try:
        yield
    except PeerError as error:
        there = f"{path} may be unfinished, and checkpoint.load would refuse it: load the checkpoint before it."
        raise PeerError(f"{error} {there}") from error.__cause__


# -- under members(): those who are present write one checkpoint, also where one of them dies meanwhile ---------------------


def refuse_among_members(comm: "Communicator", wait: bool) -> None:
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


def save_among_members(comm: "Communicator", path: str | Path, attempt: Callable[[], None]) -> Saving:
    """Run `attempt`, and once more among those who are left where a rank was lost meanwhile."""
    while True:
        if why := _passes_by(comm):
            return _passed_by(comm, path, why)
        try:
            attempt()
        except MembersChanged:
            comm.take_part()
            continue
        return written(path)


def _passes_by(comm: "Communicator") -> str:
    """Why this rank does not save now; all ranks that were at work before agree on it."""
    if comm.has_left:
        return "it has left the members, and the others have what it owed: they save"
    if comm.members_just_came:
        return "a rank has come since the last step, and is not where the others save; the next save is whole"
    return ""


def _passed_by(comm: "Communicator", path: str | Path, why: str) -> Saving:
    said = f"rank {comm.rank}, step {comm.step}: nothing was saved to {path}, since {why}"
    warnings.warn(said, RuntimeWarning, stacklevel=4)
    return Saving(path, lambda: CheckpointError(said), lambda: True)
