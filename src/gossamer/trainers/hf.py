"""Hugging Face's Trainer: `use(trainer, recipe)` trains it with a recipe. TRL's trainers and PEFT's models work through it.

The Trainer keeps its DDP, which stops averaging while `train()` runs. What is public is the consensus of all ranks: what is evaluated,
saved and pushed. What each rank holds besides is saved in a sidecar per rank, in the Trainer's own checkpoints.
"""

import contextlib
import inspect
from importlib.metadata import version
from pathlib import Path
from types import MethodType
from typing import Any

from accelerate import DistributedDataParallelKwargs

from gossamer.core.errors import AttachError, GossamerError
from gossamer.integrations import consensus
from gossamer.integrations.attach import attach
from gossamer.integrations.broadcast import make_model_equal
from gossamer.integrations.checks.wrappers import uncompiled
from gossamer.integrations.communicator import Communicator
from gossamer.recipe import Recipe
from gossamer.trainers import sidecars
from gossamer.trainers.attached_run import AttachedRun
from gossamer.trainers.hf_checks import refuse_local_sgd, refuse_options, refuse_trainer, warn_of_gathers
from gossamer.trainers.releases import TRANSFORMERS, refuse_release

refuse_release(__name__, version("transformers"), TRANSFORMERS)

from transformers.trainer import Trainer  # noqa: E402  (of the package itself, pyright would read all its models)
from transformers.trainer_callback import TrainerCallback  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

if "_internal_call" not in inspect.signature(Trainer.save_model).parameters:
    raise ImportError(
        f"Trainer.save_model of transformers {version('transformers')} has no argument '_internal_call', by which gossamer tells "
        "checkpoints from other saves; use another release of transformers, or a newer gossamer"
    )


def use(
    trainer: Trainer, recipe: str | Recipe, *, public_only: bool = False, notice: float | None = None, **options: Any
) -> None:
    """Let a Trainer train with a recipe: call it on all ranks, before `trainer.train()`.

    - `public_only`: resume from checkpoints without gossamer's files: memories begin at zero.
    - `notice`: take SIGTERM and SIGUSR1, which come so many seconds before the end: all ranks save after the same step and stop.
    - `options`: arguments of `gossamer.attach`, such as `seed`, `deadline`, `nodes` or `buffers`.

    `trainer.communicator` is the communicator while `train()` runs.

        trainer = Trainer(model, arguments, train_dataset=rows)
        gossamer.trainers.hf.use(trainer, "topk")
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
    """
    if not isinstance(trainer, Trainer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(
            f"use() takes a Trainer of transformers, or of a class made from it, got a {type(trainer).__name__}"
        )
    if isinstance(trainer, RecipeTrainer):
        raise AttachError("use() was called on this trainer already: make a new Trainer for another recipe")
    refuse_options(options)
    refuse_trainer(trainer)
    kind: Any = type(trainer)
    run = TrainerRun(trainer, Recipe.of(recipe), public_only, notice, options)
    trainer.__class__ = type(kind.__name__, (RecipeTrainer, kind), {"__module__": kind.__module__})
    trainer.__dict__["recipe_run"] = run
    _leave_first_copy_to_attach(trainer)
    # First, so that others see an attached model, and the consensus at the end.
    trainer.callback_handler.callbacks.insert(0, run)


class RecipeTrainer(Trainer):
    """What `use` makes of a trainer's class: evaluates, predicts and saves the consensus, and logs gossamer's metrics."""

    recipe_run: "TrainerRun"

    @property
    def communicator(self) -> Communicator | None:
        """The communicator while `train()` runs."""
        return None if self.recipe_run.run is None else self.recipe_run.run.comm

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        _leave_first_copy_to_attach(self)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        self.recipe_run.checkpoint = resume_from_checkpoint or None
        try:
            return super().train(resume_from_checkpoint, *args, **options)
        finally:
            self.recipe_run.detach()

    def evaluate(self, *args: Any, **options: Any) -> Any:
        with self.recipe_run.consensus():
            return super().evaluate(*args, **options)

    def predict(self, *args: Any, **options: Any) -> Any:
        with self.recipe_run.consensus():
            return super().predict(*args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        is_checkpoint = _internal_call and output_dir is not None and not self.args.save_only_model
        folder = Path(output_dir or "") if is_checkpoint else None
        if folder is not None:
            self.recipe_run.remove_sidecars(folder)
        with self.recipe_run.consensus():
            super().save_model(output_dir, _internal_call)
        if folder is not None:  # before the Trainer deletes older checkpoints
            self.recipe_run.write_sidecar(folder)

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        if "loss" in logs:  # of training; not of an evaluation, nor the summary at the end
            logs |= self.recipe_run.metrics()
        super().log(logs, *args, **options)


class TrainerRun(TrainerCallback):
    """Attaches when training begins, loads and writes sidecars, and leaves the consensus in all ranks when training ends."""

    def __init__(
        self, trainer: Any, recipe: Recipe, public_only: bool, notice: float | None, options: dict[str, Any]
    ) -> None:
        self.trainer, self.recipe, self.public_only, self.options = trainer, recipe, public_only, options
        self._notice, self._watching = notice, contextlib.ExitStack()
        self.run: AttachedRun | None = None
        self.checkpoint: str | bool | None = None  # to resume from

    # -- called by the Trainer -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        trainer = self.trainer
        try:
            comm = attach(
                uncompiled(trainer.model_wrapped),  # DDP, which the Trainer compiles with the model
                trainer.optimizer,
                self.recipe,
                scaler=trainer.accelerator.scaler,
                **self.options,
            )
        except GossamerError as error:
            if "find_unused_parameters" in str(error) and args.ddp_find_unused_parameters is None:
                error.add_note(
                    "The Trainer's DDP looks for unused parameters unless TrainingArguments(ddp_find_unused_parameters=False)"
                )
            raise
        self.run = AttachedRun(comm)
        if hasattr(comm.model, "save_pretrained"):
            vars(comm.model)["save_pretrained"] = ConsensusSave(self, comm.model)
        if self.checkpoint is not None:
            folder = get_last_checkpoint(args.output_dir) if self.checkpoint is True else self.checkpoint
            sidecars.load(comm, str(folder), self.public_only)
        if self._notice is not None:
            self._watching.enter_context(comm.leaving_at(self._notice))
        warn_of_gathers(trainer, comm, given.get("train_dataloader"))

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        refuse_local_sgd(uncompiled(self.trainer.model_wrapped), state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.run is not None and self.run.comm.stopping:
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.run is None or not self.run.goes_on:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _keep_loaded(self.run.comm)
        else:
            self.run.comm.finish()

    # -- called by RecipeTrainer ---------------------------------------------------------------------------------------

    def consensus(self) -> contextlib.AbstractContextManager[None]:
        """Swap in the consensus, unless it is there already or nothing is attached."""
        return contextlib.nullcontext() if self.run is None else self.run.consensus()

    def remove_sidecars(self, folder: Path) -> None:
        """Remove the files of an earlier run, perhaps of another number of ranks."""
        if self.run is not None:
            sidecars.remove_older(folder, self.run.comm.rank, self.run.comm.size)

    def write_sidecar(self, folder: Path) -> None:
        if self.run is not None and self.run.goes_on:
            sidecars.write(self.run.comm, folder)

    def metrics(self) -> dict[str, float]:
        return self.run.log() if self.run is not None and self.run.goes_on else {}

    def detach(self) -> None:
        """Detach, if training has ended with an exception; give the model back as it was."""
        self._watching.close()
        run, self.run = self.run, None
        if run is None:
            return
        vars(run.comm.model).pop("save_pretrained", None)
        if run.goes_on:
            run.comm.detach()


class ConsensusSave:
    """`model.save_pretrained` while training runs: saves the consensus. All ranks call it together."""

    def __init__(self, run: TrainerRun, model: Any) -> None:
        self._run, self._model = run, model

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._run.consensus():
            return type(self._model).save_pretrained(self._model, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model saves itself."""
        copied = memo.get(id(self._model), self._model)
        return MethodType(type(copied).save_pretrained, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "save_pretrained")


class DDPWithoutFirstCopy(DistributedDataParallelKwargs):
    """The options of a Trainer's DDP, which no longer sends the whole model when it is made: `attach` sends what differs."""

    def to_kwargs(self) -> dict[str, Any]:
        return {**super().to_kwargs(), "init_sync": False}


def _leave_first_copy_to_attach(trainer: Any) -> None:
    accelerator = trainer.accelerator
    accelerator.ddp_handler = DDPWithoutFirstCopy(**vars(accelerator.ddp_handler or DistributedDataParallelKwargs()))


def _keep_loaded(comm: Communicator) -> None:
    """End training with the model that the Trainer has loaded, such as the best: of rank 0, where another rank's differs."""
    loaded = consensus.remember(comm.model)
    comm.fabric.run(comm.worker.quiesce(), "train end", comm.step)  # what is in flight would change the model
    consensus.restore(comm.model, loaded)
    if comm.size > 1:
        comm.fabric.run(make_model_equal(comm.model, comm.worker, [*loaded]), "train end", comm.step)
    comm.detach()
