"""Accelerate: one line after `accelerator.prepare` trains with a recipe.

Accelerate's DDP stays around the model, but the recipe averages. `accumulate()`, clipping and mixed precision work as before.
Of an accelerator with an attached model these methods are replaced until `comm.detach()`: `save_state` and `load_state` also save
and load sidecars, `get_state_dict` (and so `save_model`) returns the consensus, `log` adds gossamer's metrics. A model that FSDP2
shards, and its optimizers, are saved by `gossamer.checkpoint`, in a folder of their own in that of `save_state`.
"""

import contextlib
import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final
from weakref import WeakSet

from torch import Tensor, nn

from gossamer.core.errors import AttachError, CheckpointError
from gossamer.integrations import checkpoint
from gossamer.integrations.all_ranks import gathered
from gossamer.integrations.attach import attach as attach_model
from gossamer.integrations.checks.wrappers import optimizer_inside
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.ddp_wrapper import syncs
from gossamer.integrations.groups import Given
from gossamer.integrations.held_model import cut_again
from gossamer.recipe import Recipe
from gossamer.runtime import is_sharded
from gossamer.trainers import sidecars
from gossamer.trainers.attached_run import TrainerLog
from gossamer.trainers.releases import ACCELERATE, refuse_release

try:
    import accelerate
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.local_sgd import LocalSGD
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError(
        f"gossamer.trainers.accelerate needs accelerate: pip install '.[accelerate]' in the clone ({error})"
    ) from error

SHARDS = "gossamer"  # in the folder of save_state: a model that FSDP2 shards, and all that ranks hold of it
PREPARED = "_is_accelerate_prepared"  # Accelerate's mark on what `prepare` returned
REPLACED = (
    "get_state_dict",
    "save_state",
    "load_state",
    "log",
    "register_for_checkpointing",
    "join_uneven_inputs",
    "end_training",
)
_attached: "WeakSet[accelerate.Accelerator]" = WeakSet()


refuse_release(__name__, accelerate.__version__, ACCELERATE)

PRIVATE = {"_models": "save_state()", "_optimizers": "save_state()", "_dataloaders": "warnings of dispatched batches"}
for _name, _use in PRIVATE.items():  # what an accelerator has prepared; it is told by no public name
    if _name not in accelerate.Accelerator.free_memory.__code__.co_names:
        raise ImportError(
            f"accelerators of accelerate {accelerate.__version__} have no attribute {_name!r}, which gossamer's {_use} needs; use "
            "another release of accelerate, or a newer gossamer"
        )


def attach(
    accelerator: "accelerate.Accelerator",
    model: nn.Module,
    optimizer: Any,
    recipe: str | Recipe | None = None,
    process_group: Given = None,
    *,
    public_only: bool = False,
    **options: Any,
) -> Communicator:
    """Attach a recipe to a model and an optimizer that `accelerator.prepare` has returned; the loop stays as it is.

    `public_only=True` lets `load_state` load a checkpoint without gossamer's files: memories then begin at zero. Other
    `options` are those of `gossamer.attach`.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        comm = gossamer.trainers.accelerate.attach(accelerator, model, optimizer, "topk")
    """
    _refuse(accelerator, model, optimizer)
    options.setdefault("scaler", accelerator.scaler)
    comm = attach_model(model, optimizer, recipe, process_group, **options)
    if not hasattr(model, "no_sync"):  # `accelerator.accumulate` asks the model for it; a later attach has its own
        vars(model)["no_sync"] = comm.no_sync
        comm._handles.append(SimpleNamespace(remove=partial(vars(model).pop, "no_sync", None)))
    comm._handles.append(AttachedAccelerator(accelerator, comm, public_only))
    _warn_of_dispatched_batches(accelerator, comm)
    return comm


@final
class AttachedAccelerator:
    """Methods of an accelerator that know of the communicator, in place of its own until `remove`."""

    def __init__(self, accelerator: "accelerate.Accelerator", comm: Communicator, public_only: bool) -> None:
        self._accelerator, self._comm, self._public_only = accelerator, comm, public_only
        self._log, self._folder = TrainerLog(comm), Path()
        self._before = {name: getattr(accelerator, name) for name in REPLACED}
        self._hooks = [
            accelerator.register_save_state_pre_hook(self._before_saving),
            accelerator.register_load_state_pre_hook(self._before_loading),
        ]
        for name in REPLACED:
            setattr(accelerator, name, getattr(self, name))
        _attached.add(accelerator)

    def remove(self) -> None:
        """Give the accelerator its own methods back."""
        for hook in self._hooks:
            hook.remove()
        for name in REPLACED:
            vars(self._accelerator).pop(name, None)
        _attached.discard(self._accelerator)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the consensus of the ranks if their models differ now; then all ranks call this together.

        A model that FSDP2 shards is put together on all ranks, and returned on the main process, as Accelerate does it.
        """
        comm, of = self._comm, self._before["get_state_dict"]
        if not self._is(model):
            return of(model, unwrap)
        if comm.is_sharded and not self._accelerator.is_fsdp2:
            of = self._put_together
        if not may_differ(comm):
            return of(model, unwrap)
        with comm.consensus():
            return {name: value.clone() for name, value in of(model, unwrap).items()}

    def _put_together(self, model: nn.Module, unwrap: bool) -> dict[str, Any]:
        cut_again(self._comm.model)
        state = self._before["get_state_dict"](model, unwrap)
        wholes = {name: _on_host(value) for name, value in state.items()}
        return wholes if self._accelerator.is_main_process else {}

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the public model and all that Accelerate saves, then what each rank holds besides."""
        with self._shards_left_out():
            place = self._before["save_state"](*args, **kwargs)
        # Last, for a save that is cut off then has no complete set of them.
        if self._comm.is_sharded:
            checkpoint.save(self._comm, self._folder / SHARDS)
        else:
            sidecars.write(self._comm, self._folder)
        return place

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what Accelerate has saved, and what each rank holds besides."""
        with self._shards_left_out():
            self._before["load_state"](*args, **kwargs)
        if not self._comm.is_sharded:
            sidecars.load(self._comm, self._folder, self._public_only)

    @contextlib.contextmanager
    def _shards_left_out(self) -> Generator[None, None, None]:
        """Hide a model that FSDP2 shards, and its optimizers, from Accelerate, which would save the shards of some ranks only."""
        accelerator: Any = self._accelerator
        models, optimizers = accelerator._models, accelerator._optimizers
        if self._comm.is_sharded:
            accelerator._models = [m for m in models if not self._is(m)]
            accelerator._optimizers = [o for o in optimizers if optimizer_inside(o) not in self._comm.optimizers]
        try:
            yield
        finally:
            accelerator._models, accelerator._optimizers = models, optimizers

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log the values and gossamer's metrics since the last log."""
        self._before["log"]({**values, **self._log()}, step=step, log_kwargs=log_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Refuse the communicator: Accelerate would save that of rank 0 only."""
        if any(isinstance(each, Communicator) for each in objects):
            raise AttachError(
                "register_for_checkpointing(comm) would save the state of rank 0 only: leave it out, accelerator.save_state() and "
                "load_state() save and load the state of all ranks"
            )
        self._before["register_for_checkpointing"](*objects)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Any:
        """Refuse uneven inputs: ranks would take different numbers of steps."""
        even = self._accelerator.even_batches if even_batches is None else even_batches
        if not even and self._comm.size > 1:
            raise AttachError(
                "join_uneven_inputs() lets ranks take different numbers of steps, and a recipe needs the same number on all ranks: "
                "leave it out, and keep even_batches=True"
            )
        return self._before["join_uneven_inputs"](joinables, even_batches)

    def end_training(self) -> None:
        """Detach before Accelerate destroys the process group."""
        self._comm.detach()
        self._before["end_training"]()

    def _is(self, model: nn.Module) -> bool:
        inside = self._accelerator.unwrap_model(model)
        return inside is self._comm.model or inside is self._accelerator.unwrap_model(self._comm.model)

    def _before_saving(self, models: Any, weights: Any, folder: str) -> None:
        """Remove what an older save left in the same folder before its model is overwritten."""
        self._folder = Path(folder)
        sidecars.remove_older(self._folder, self._comm.rank, self._comm.size)
        if self._accelerator.is_main_process:
            shutil.rmtree(self._folder / SHARDS, ignore_errors=True)
        if self._comm.is_sharded:
            gathered(self._comm, {})  # all ranks write into a new folder

    def _before_loading(self, models: Any, folder: str) -> None:
        """Raise all errors of gossamer before Accelerate changes anything; what is sharded is loaded here."""
        self._folder = Path(folder)
        if self._comm.is_sharded:
            self._load_shards(self._folder / SHARDS)
        elif not self._public_only:
            sidecars.check(self._comm, self._folder)

    def _load_shards(self, folder: Path) -> None:
        try:
            checkpoint.load(self._comm, folder, public_only=self._public_only)
        except CheckpointError as error:
            if folder.is_dir():
                raise
            raise CheckpointError(
                f"{error}. The checkpoint was saved without gossamer, or of a model that was not sharded, or its save was cut off: load "
                "the one before it. To go on from a checkpoint of Accelerate alone, call load_state() before attach"
            ) from None


def may_differ(comm: Communicator) -> bool:
    """True if the ranks' models may differ now, or are not what is judged."""
    return not comm.recipe.is_synced(comm.step) or not comm._holds_the_consensus()


def _on_host(value: Any) -> Any:
    """A tensor in the host's memory, whole."""
    if not isinstance(value, Tensor):
        return value
    whole: Any = value
    return (whole.full_tensor() if is_sharded(value) else whole).detach().cpu()


# -- refusals ------------------------------------------------------------------------------------------------------


def _refuse(accelerator: "accelerate.Accelerator", model: nn.Module, optimizer: Any) -> None:
    kind = accelerator.distributed_type.value
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise AttachError(
            "the accelerator shards with FSDP1, which a recipe does not support: use fsdp_version=2, or the plain model"
        )
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise AttachError(
            f"the accelerator runs {kind}, which averages and steps by itself: launch with DDP, accelerate launch --multi_gpu, or "
            "--cpu for processors"
        )
    ranks = int(os.environ.get("WORLD_SIZE") or 1)  # processes that torchrun or `accelerate launch` has started
    if kind == "NO" and ranks > 1:
        raise AttachError(
            f"{ranks} processes were started, but the accelerator takes each for the only one, and gives all of them the same "
            "data: without a GPU, make it with Accelerator(cpu=True)"
        )
    if accelerator in _attached:
        raise AttachError(
            "a model of this accelerator is attached already, and save_state() saves one: call detach() on its communicator "
            "first, or put both networks into one module"
        )
    for optimizer_given in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if not isinstance(optimizer_given, AcceleratedOptimizer):
            raise AttachError(
                f"the optimizer is a {type(optimizer_given).__name__} that accelerator.prepare() has not returned: attach after "
                "model, optimizer, ... = accelerator.prepare(model, optimizer, ...)"
            )
    if not getattr(model, PREPARED, False):
        raise AttachError(
            f"the model is a {type(model).__name__} that accelerator.prepare() has not returned: attach after "
            "model, optimizer, ... = accelerator.prepare(model, optimizer, ...)"
        )
    if not syncs(model):
        raise AttachError(
            "the model is under no_sync(), as inside of Accelerate's LocalSGD: attach outside of it; for local steps leave "
            "LocalSGD out and use the recipe 'local_sgd(8)'"
        )


def _warn_of_dispatched_batches(accelerator: "accelerate.Accelerator", comm: Communicator) -> None:
    loaders: list[Any] = accelerator._dataloaders
    averages = comm.recipe.schedule.shape.averages_gradients
    if comm.size > 1 and not averages and any(isinstance(loader, DataLoaderDispatcher) for loader in loaders):
        warnings.warn(
            f"rank 0 sends every batch to the other ranks (dispatch_batches=True, the default for iterable datasets), so under "
            f"{comm.recipe} the network is used in every step: pass DataLoaderConfiguration(dispatch_batches=False)",
            stacklevel=3,
        )


_local_sgd: Any = LocalSGD
_enter_local_sgd = _local_sgd.__enter__


def _refuse_local_sgd(local_sgd: Any) -> Any:
    """Enter Accelerate's LocalSGD, unless a recipe is attached to its accelerator."""
    if local_sgd.enabled and local_sgd.accelerator in _attached:
        raise AttachError(
            "Accelerate's LocalSGD averages a model that has a recipe attached: leave LocalSGD out, and use the recipe "
            f"'local_sgd({local_sgd.local_sgd_steps})'"
        )
    return _enter_local_sgd(local_sgd)


_local_sgd.__enter__ = _refuse_local_sgd
