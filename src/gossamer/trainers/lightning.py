"""Lightning's Trainer: a strategy that trains with a recipe, `Trainer(strategy=Strategy("topk"))`.

DDP stays around the model, but the recipe averages. Evaluations see the consensus; checkpoints hold it, with sidecars beside
them; after `fit` every rank holds it.
"""

import contextlib
import copy
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gossamer.core.errors import AttachError
from gossamer.integrations.communicator import Communicator
from gossamer.recipe import Recipe
from gossamer.trainers.lightning_shared import KEY, NEEDS, WithRecipe, remove_sidecars, save_sidecars
from gossamer.trainers.releases import LIGHTNING, refuse_release

try:
    import lightning
    from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(f"gossamer.trainers.lightning {NEEDS}") from error

refuse_release(__name__, lightning.__version__, LIGHTNING)


class LightningStrategy(WithRecipe, DDPStrategy):
    """Trains with a recipe; everything else is as under Lightning's DDPStrategy.

    - `recipe`: as for `gossamer.attach`. Default: the environment variable GOSSAMER_RECIPE.
    - `attach_options`: more arguments of `gossamer.attach`, such as `{"nodes": "hosts", "buffers": "average"}`.
    - `public_only`: resume from the trainer's model alone where a checkpoint has no sidecars; memories then begin at zero.
    - `notice`: take SIGTERM and SIGUSR1, which come so many seconds before the end: all ranks save `last.ckpt` after the same
      step, and stop.
    - other options are those of DDPStrategy, such as `find_unused_parameters=True`.

    Example: `Trainer(accelerator="cpu", devices=2, strategy=gossamer.trainers.lightning.Strategy("topk"))`
    """

    _trainer: Any = None
    _loaded_from: str | Path = ""

    def __init__(self, recipe: str | Recipe | None = None, *, notice: float | None = None, **options: Any) -> None:
        super().__init__(recipe, **options)
        self._stop = None if notice is None else StopsOnNotice(notice)

    @property
    def comm(self) -> Communicator:
        """The communicator, while `fit` runs."""
        if self._run is None:
            raise AttachError(
                "the model is attached only while trainer.fit() runs: use strategy.comm in a hook or callback"
            )
        return self._run.comm

    # -- beginning and end -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Wrap the model, make the optimizer, and attach the recipe to both before a checkpoint's state is restored."""
        self._trainer = trainer
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        _refuse_averaging_callbacks(trainer)
        if len(self.optimizers) != 1:
            raise AttachError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, and Lightning steps them at times of its own, "
                "while the recipe counts one step for all: return one optimizer, with a parameter group for each part of the model"
            )
        assert self.model is not None
        self._run = self._attached_to(self.model, self.optimizers[0], self.precision_plugin)
        if self._stop is not None:
            trainer.callbacks.insert(0, self._stop)

    def teardown(self) -> None:
        """Leave the consensus on every rank after `fit`; after an exception, only detach."""
        run, self._run = self._run, None
        if self._stop is not None:
            self._stop.leave(self._trainer)
        if run is not None:
            run.leave_consensus()
            run.comm.detach() if self._ends_alone else run.comm.finish()
        super().teardown()

    @property
    def _ends_alone(self) -> bool:
        """True after an exception: other ranks may not come to whatever is done together."""
        return self._trainer is not None and self._trainer.interrupted

    # -- steps -------------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Any) -> None:
        """Prepare no average of DDP, as Lightning would under manual optimization."""
        if self._run is None:
            super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Any) -> None:
        """Begin no average of DDP, as Lightning would under manual optimization with a static graph."""
        if self._run is None:
            super().post_backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Step; at the trainer's logging interval, add the metrics of gossamer to its log."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._run is not None and self._logs_this_step():
            assert self.lightning_module is not None
            self.lightning_module.log_dict(self._run.log(), on_step=True, on_epoch=False)
        return output

    def _logs_this_step(self) -> bool:
        every = self._trainer.log_every_n_steps
        return every > 0 and (self._trainer.global_step + 1) % every == 0  # the trainer counts the step afterwards

    # -- evaluations -------------------------------------------------------------------------------------------------

    def _enter_consensus(self) -> None:
        """Swap in the consensus."""
        if self._run is not None:
            self._run.enter_consensus()

    def _leave_consensus(self) -> None:
        """Put this rank's own model back."""
        if self._run is not None:
            self._run.leave_consensus()

    on_validation_start = on_test_start = on_predict_start = _enter_consensus
    on_validation_end = on_test_end = on_predict_end = _leave_consensus

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the consensus; after an exception, this rank's own model."""
        if self._run is None or self._ends_alone:
            return super().lightning_module_state_dict()
        with self._run.consensus():
            return copy.deepcopy(super().lightning_module_state_dict())  # the model changes back before it is written

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write the file on rank 0, and the sidecars of all ranks beside it unless it holds weights only."""
        if self._run is not None and not self._ends_alone and "optimizer_states" in checkpoint:
            filepath = self.broadcast(os.fspath(filepath))  # names may contain metrics that differ between ranks
            checkpoint[KEY] = save_sidecars(self._run, filepath)
        elif self.is_global_zero:
            remove_sidecars(filepath, 0)  # they would be of an older save
            if self._run is not None and self._ends_alone and self._run.comm.size > 1:
                warnings.warn(
                    f"{filepath} is saved after an exception: it holds rank 0's own model and optimizer, not the consensus, "
                    "and no memories. To go on from it, pass Strategy(..., public_only=True)",
                    stacklevel=2,
                )
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint and its sidecars."""
        super().remove_checkpoint(filepath)
        remove_sidecars(filepath, self.global_rank)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file; its sidecars are loaded after the optimizer."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer, then the sidecars, which may hold another model and optimizer for this rank."""
        super().load_optimizer_state_dict(checkpoint)
        if self._run is not None:
            self._load_sidecars(self._run, self._loaded_from, checkpoint.get(KEY))

    # -- what ranks do together, but not after an exception ----------------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks; after an exception, for none."""
        if not self._ends_alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`; after an exception, this rank's own."""
        return obj if self._ends_alone else super().broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together; after an exception, alone."""
        return decision if self._ends_alone else super().reduce_boolean_decision(decision, all)


Strategy = LightningStrategy


class StopsOnNotice(Callback):
    """Saves and stops, by the trainer's own calls, after the step after which all ranks stop."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._watching, self._evaluated = seconds, contextlib.ExitStack(), None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the signals: after Lightning has, which would end the run by an exception of one rank."""
        self._watching.enter_context(trainer.strategy.comm.leaving_at(self._seconds))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save where `ckpt_path="last"` looks for it, evaluate no more, and leave the loops whatever their least lengths are."""
        comm: Communicator = trainer.strategy.comm
        if trainer.should_stop or not comm.stopping:
            return
        saves = trainer.checkpoint_callback
        folder = None if saves is None else getattr(saves, "dirpath", None)
        began = time.monotonic()
        path = os.path.join(folder or trainer.default_root_dir, "last.ckpt")
        trainer.save_checkpoint(path)
        comm.took_to_save(path, time.monotonic() - began, is_over=True)
        self._evaluated, trainer.limit_val_batches = trainer.limit_val_batches, 0
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        trainer.should_stop = True

    def leave(self, trainer: Any) -> None:
        """Give the signals back, and the trainer its evaluations."""
        self._watching.close()
        if self._evaluated is not None:
            trainer.limit_val_batches, self._evaluated = self._evaluated, None
        if self in trainer.callbacks:
            trainer.callbacks.remove(self)


def _refuse_averaging_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise AttachError(
                f"the callback {type(callback).__name__} averages each rank's own model over time and writes the result into it, "
                "behind the recipe's back: leave it out"
            )
