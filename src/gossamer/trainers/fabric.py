"""Fabric: a strategy that trains with a recipe, `Fabric(strategy=Strategy("topk"))`.

DDP stays around the model, but the recipe averages. Fabric's loop is the user's: `strategy.consensus()` around evaluations,
`strategy.metrics()` for the log, `strategy.comm.finish()` at the end.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.integrations.communicator import Communicator
from gossamer.recipe import Recipe
from gossamer.trainers.attached_run import AttachedRun
from gossamer.trainers.lightning_shared import KEY, NEEDS, WithRecipe, remove_sidecars, save_sidecars
from gossamer.trainers.releases import LIGHTNING, refuse_release

try:
    import lightning
    from lightning.fabric.strategies.ddp import DDPStrategy
except ImportError as error:
    raise ImportError(f"gossamer.trainers.fabric {NEEDS}") from error

refuse_release(__name__, lightning.__version__, LIGHTNING)


class FabricStrategy(WithRecipe, DDPStrategy):
    """Trains with a recipe; everything else is as under Fabric's DDPStrategy.

    - `recipe`: as for `gossamer.attach`. Default: the environment variable GOSSAMER_RECIPE.
    - `attach_options`: more arguments of `gossamer.attach`, such as `{"nodes": "hosts", "buffers": "average"}`.
    - `public_only`: resume from the public model alone where a checkpoint has no sidecars; memories then begin at zero.
    - `notice`: take SIGTERM and SIGUSR1, which come so many seconds before the end, until the recipe ends: the loop asks
      `strategy.comm.stopping` after each step, on all ranks, and where it is true saves and ends.
    - other options are those of DDPStrategy, such as `find_unused_parameters=True`.

    Example: `Fabric(accelerator="cpu", devices=2, strategy=gossamer.trainers.fabric.Strategy("topk"))`
    """

    def __init__(self, recipe: str | Recipe | None = None, *, notice: float | None = None, **options: Any) -> None:
        super().__init__(recipe, **options)
        self._notice = notice

    # -- what a loop may call ----------------------------------------------------------------------------------------

    @property
    def comm(self) -> Communicator:
        """The communicator of the model that `fabric.setup(model, optimizer)` has attached."""
        return self._attached().comm

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Swap in the consensus for an evaluation. All ranks enter it together; `fabric.save` may be called inside."""
        return self._attached().consensus()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of gossamer since the last call, for `fabric.log_dict`."""
        return self._attached().log()

    def _attached(self) -> AttachedRun:
        if self._run is None:
            raise AttachError("no model is attached yet: call fabric.setup(model, optimizer) first")
        return self._run

    # -- setup -------------------------------------------------------------------------------------------------------

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        """Wrap the model in DDP, and attach the recipe to it and its optimizers."""
        if self._run is not None and self._run.goes_on:
            raise AttachError(
                "fabric.setup(model, optimizer) was called a second time, but this strategy trains one model: call "
                "fabric.strategy.comm.finish() first, or put both models into one module with all optimizers"
            )
        wrapped = self.setup_module(module)
        self._run = self._attached_to(wrapped, optimizers, self.precision)
        if self._notice is not None:
            self._watch(self._run.comm, self._notice)
        return wrapped, optimizers, scheduler

    @staticmethod
    def _watch(comm: Communicator, seconds: float) -> None:
        """Take the signals until the communicator is detached."""
        watching = contextlib.ExitStack()
        watching.enter_context(comm.leaving_at(seconds))
        comm._handles.append(SimpleNamespace(remove=watching.close))

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refuse an optimizer without its model."""
        raise AttachError(
            "fabric.setup_optimizers() gives the strategy an optimizer without its model, which the recipe needs too: call "
            "fabric.setup(model, optimizer)"
        )

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write the consensus on rank 0; with the optimizers, also the sidecars of all ranks beside it."""
        run = self._run if self._run is not None and self._run.goes_on else None
        if run is not None and self._holds_all(run, state):
            path = self.broadcast(str(path))
            state = {**state, KEY: save_sidecars(run, path)}
        else:
            remove_sidecars(path, self.global_rank)  # they would be of an older save
        with contextlib.nullcontext() if run is None else run.consensus():
            super().save_checkpoint(path, state, storage_options, dict(filter or {}))

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the file; where it is loaded into the model and its optimizers, load the sidecars too."""
        rest = super().load_checkpoint(path, state, strict, weights_only)
        run = self._run if self._run is not None and self._run.goes_on else None
        if run is None or not isinstance(state, dict) or not self._holds_all(run, state):
            return rest
        self._load_sidecars(run, path, rest.pop(KEY, None))
        return rest

    def _holds_all(self, run: AttachedRun, state: Mapping[str, Any]) -> bool:
        """True if the state holds the attached model and all of its optimizers, and training can go on from it."""
        inside = {id(getattr(value, "module", value)) for value in state.values() if isinstance(value, nn.Module)}
        held = {id(value) for value in state.values()}
        return id(run.comm.model) in inside and all(id(o) in held for o in run.comm.optimizers)


Strategy = FabricStrategy
