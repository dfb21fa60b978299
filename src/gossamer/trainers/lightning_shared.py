"""What the strategies of Lightning's Trainer and of Fabric share: their options, and sidecars beside one file.

A checkpoint of Lightning is one file of rank 0, `NAME.ckpt`. The sidecars of all ranks are in a folder beside it,
`NAME.ckpt.gossamer`. The file names the step that its sidecars belong to, so that files of two saves are told apart.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gossamer.core.errors import AttachError, CheckpointError
from gossamer.integrations.attach import attach
from gossamer.recipe import Recipe
from gossamer.trainers import sidecars
from gossamer.trainers.attached_run import AttachedRun
from gossamer.trainers.releases import LIGHTNING

KEY = "gossamer"  # of a checkpoint: the recipe and the step of its sidecars
NEEDS = f"needs {LIGHTNING}. The packages pytorch_lightning and lightning_fabric have classes of their own, which are not served"
OTHER_HOOKS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


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
    with contextlib.suppress(OSError):  # rank 0 removes the folder, or has done so: also while this rank lists it
        for file in folder.glob(f"gossamer-rank{rank}-of-*.pt"):
            file.unlink(missing_ok=True)
        folder.rmdir()


def save_sidecars(run: AttachedRun, path: str | Path) -> dict[str, Any]:
    """Write all ranks' sidecars beside `path`; return what the file itself is to hold under `KEY`.

    A sidecar holds this rank's own model: during an evaluation the consensus gives way to it.
    """
    judged = run.shows_consensus
    run.leave_consensus()
    sidecars.write(run.comm, folder_of(path))
    if judged:
        run.enter_consensus()
    return {"recipe": str(run.comm.recipe), "step": run.comm.step}


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
        return AttachedRun(attach(model, optimizers, self._recipe, **options))

    def _load_sidecars(self, run: AttachedRun, path: str | Path, stamp: Mapping[str, Any] | None) -> None:
        """Load the sidecars of a checkpoint that the trainer has loaded; `stamp` is what it holds under `KEY`."""
        if self._public_only:
            return
        folder = folder_of(os.path.realpath(os.fspath(path).removeprefix("file://")))
        sidecars.load(run.comm, folder)
        if stamp is None or stamp["step"] != run.comm.step:
            saved = "without gossamer" if stamp is None else f"at step {stamp['step']}"
            raise CheckpointError(
                f"rank {run.comm.rank}: {path} was saved {saved}, but the files in {folder} at step {run.comm.step}: one of "
                "them was overwritten by another save. Load another checkpoint, or go on from the trainer's model alone, with "
                "memories that begin at zero: Strategy(..., public_only=True)"
            )
