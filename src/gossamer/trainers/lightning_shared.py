"""What the strategies of Lightning's Trainer and of Fabric share: the release, the consensus, and sidecars beside one file.

A checkpoint of Lightning is one file of rank 0, `NAME.ckpt`. The sidecars of all ranks are in a folder beside it,
`NAME.ckpt.gossamer`. The file names the step that its sidecars belong to, so that files of two saves are told apart.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from gossamer.core.errors import AttachError, CheckpointError
from gossamer.integrations.attach import attach
from gossamer.integrations.communicator import Communicator, attached
from gossamer.recipe import Recipe
from gossamer.trainers import sidecars
from gossamer.trainers.logs import TrainerLog

KEY = "gossamer"  # of a checkpoint: the recipe and the step of its sidecars
NEEDS = (
    "needs the package lightning, version 2.6 or a later one below 3: pip install 'gossamer[lightning]'. The packages "
    "pytorch_lightning and lightning_fabric have classes of their own, which are not served"
)
OTHER_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def refuse_release(module: str, version: str) -> None:
    """Raise an ImportError for a release of lightning that this module was not written for.

    >>> refuse_release("gossamer.trainers.fabric", "2.6.1")
    >>> refuse_release("gossamer.trainers.fabric", "2.4.0")
    Traceback (most recent call last):
        ...
    ImportError: lightning 2.4.0 is installed, but gossamer.trainers.fabric needs the package lightning, version 2.6 ...
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not (2, 6) <= numbers < (3,):
        raise ImportError(f"lightning {version} is installed, but {module} {NEEDS}")


def refuse_other_hooks(options: Mapping[str, Any]) -> None:
    """Refuse options of DDPStrategy that average in another way than the recipe."""
    for name in OTHER_HOOKS:
        if options.get(name) is not None:
            raise AttachError(
                f"Strategy(..., {name}=) asks DDP to average in another way than the recipe: leave it out"
            )


def folder_of(path: str | Path) -> Path:
    """The folder of a checkpoint's sidecars.

    >>> folder_of("runs/last.ckpt").as_posix()
    'runs/last.ckpt.gossamer'
    """
    text = os.fspath(path).removeprefix("file://")
    if "://" in text:
        raise CheckpointError(
            f"{text} is not in a file system, where each rank could write its own file beside it: save to a folder that all "
            "machines share, and copy it from there"
        )
    return Path(f"{text}.gossamer")


def remove_sidecars(path: str | Path, rank: int) -> None:
    """Remove the sidecars of a checkpoint that is removed or overwritten. Ranks need not call it together.

    Rank 0 removes the folder; other ranks their own file, in case they do not share the folder.
    """
    if "://" in os.fspath(path).removeprefix("file://"):
        return  # never written
    folder = folder_of(path)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for file in folder.glob(f"gossamer-rank{rank}-of-*.pt"):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # rank 0 removes it, or has done so
        folder.rmdir()


class AttachedRun:
    """An attached model under a strategy: knows whether the consensus is in the model, and saves and loads sidecars."""

    def __init__(self, comm: Communicator, public_only: bool) -> None:
        self.comm, self.public_only, self.log = comm, public_only, TrainerLog(comm)
        self._inside: contextlib.ExitStack | None = None

    @property
    def goes_on(self) -> bool:
        """False once the communicator has been detached, by `comm.finish()` too."""
        return self.comm.model in attached

    def enter_consensus(self) -> None:
        """Swap in the consensus until `leave_consensus`. All ranks call it together."""
        if self._inside is None and self.goes_on:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.comm.consensus())
                self._inside = stack.pop_all()

    def leave_consensus(self) -> None:
        """Put this rank's own model back, if the consensus is in its place. Nothing is communicated."""
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the consensus, unless it is there already."""
        if self._inside is not None:
            yield
            return
        self.enter_consensus()
        try:
            yield
        finally:
            self.leave_consensus()

    def save_sidecars(self, path: str | Path) -> dict[str, Any]:
        """Write all ranks' sidecars beside `path`; return what the file itself is to hold under `KEY`.

        A sidecar holds this rank's own model: during an evaluation the consensus gives way to it.
        """
        judged = self._inside is not None
        self.leave_consensus()
        sidecars.write(self.comm, folder_of(path))
        if judged:
            self.enter_consensus()
        return {"recipe": str(self.comm.recipe), "step": self.comm.step}

    def load_sidecars(self, path: str | Path, stamp: Mapping[str, Any] | None) -> None:
        """Load the sidecars of a checkpoint that the trainer has loaded; `stamp` is what it holds under `KEY`."""
        if self.public_only:
            return
        folder = folder_of(os.path.realpath(os.fspath(path).removeprefix("file://")))
        sidecars.load(self.comm, folder)
        if stamp is None or stamp["step"] != self.comm.step:
            saved = "without gossamer" if stamp is None else f"at step {stamp['step']}"
            raise CheckpointError(
                f"rank {self.comm.rank}: {path} was saved {saved}, but the files in {folder} at step {self.comm.step}: one of "
                "them was overwritten by another save. Load another checkpoint, or go on from the trainer's model alone, with "
                "memories that begin at zero: Strategy(..., public_only=True)"
            )
        self.log = TrainerLog(self.comm)  # loading begins its counters anew


class WithRecipe:
    """The options of both strategies, and how they attach; a base beside either DDPStrategy."""

    _run: AttachedRun | None = None

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        *,
        attach_options: Mapping[str, Any] | None = None,
        public_only: bool = False,
        **ddp: Any,
    ) -> None:
        refuse_other_hooks(ddp)
        super().__init__(**ddp)
        self._recipe, self._attach_options, self._public_only = recipe, {**(attach_options or {})}, public_only

    def _attached_to(self, model: Any, optimizers: Any, precision: Any) -> AttachedRun:
        """Attach the recipe, with the scaler of the trainer's precision if it has one."""
        options: dict[str, Any] = {"scaler": getattr(precision, "scaler", None), **self._attach_options}
        return AttachedRun(attach(model, optimizers, self._recipe, **options), self._public_only)
