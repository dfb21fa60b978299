"""What gossamer refuses and warns of under Hugging Face's Trainer. Nothing here imports the framework."""

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from gossamer.core.errors import AttachError
from gossamer.integrations.attach import attach
from gossamer.integrations.communicator import Communicator
from gossamer.integrations.ddp_wrapper import syncs

OWN = ("process_group", "scaler", "find_unused_parameters")  # arguments of attach that the Trainer knows itself


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse options that `gossamer.attach` does not have, or that the Trainer sets itself."""
    known = inspect.signature(attach).parameters
    takes = [name for name, p in known.items() if p.kind is p.KEYWORD_ONLY and name not in OWN]
    for name in options:
        if name in OWN:
            raise AttachError(f"use(..., {name}=) is set by the Trainer: leave it out")
        if name not in takes:
            raise AttachError(f"use() has no option {name!r}; it takes public_only, and of attach: {', '.join(takes)}")


def refuse_trainer(trainer: Any) -> None:
    """Refuse ways to train in which a recipe would have no effect, or another effect than documented."""
    if trainer.is_in_train:
        raise AttachError(
            "use() was called while train() runs, or after it failed: make a new Trainer, and call use() before train()"
        )
    if trainer.is_deepspeed_enabled:
        raise AttachError(
            "the Trainer trains with DeepSpeed, which averages and steps by itself: leave TrainingArguments(deepspeed=) and "
            "Accelerate's DeepSpeed configuration out"
        )
    if trainer.is_fsdp_enabled:
        raise AttachError(
            "the Trainer shards the model with FSDP: leave TrainingArguments(fsdp=) and Accelerate's FSDP configuration out; for a "
            "model sharded by fully_shard write a loop and call gossamer.attach in it"
        )
    mode = trainer.args.parallel_mode.name
    if mode == "NOT_DISTRIBUTED":
        raise AttachError(
            f"one process trains on {trainer.args.n_gpu} GPUs with DataParallel, which averages by itself: start one process per GPU "
            "with torchrun --nproc-per-node, or show this process one GPU with CUDA_VISIBLE_DEVICES"
        )
    if mode not in ("DISTRIBUTED", "NOT_PARALLEL"):
        raise AttachError(f"the Trainer trains in the mode {mode}; gossamer works with processes started by torchrun")
    if trainer.args.auto_find_batch_size:
        raise AttachError(
            "TrainingArguments(auto_find_batch_size=True) lets one rank begin again alone when its memory is full, and all others "
            "would wait for it: set per_device_train_batch_size, and leave auto_find_batch_size out"
        )


def refuse_local_sgd(model: Any, step: int) -> None:
    """Refuse a model under `no_sync()` at the beginning of a step: gradients would never be averaged."""
    if not syncs(model):
        raise AttachError(
            f"step {step} begins under no_sync() of the DDP model, as inside Accelerate's LocalSGD, which averages models by itself: "
            "leave LocalSGD out, and use a recipe with local steps, such as local_sgd(8)"
        )


def warn_of_gathers(trainer: Any, comm: Communicator, loader: Any) -> None:
    """Warn of what the Trainer sends to all ranks in every step, where the recipe does not."""
    if comm.size == 1 or comm.rank > 0 or comm.recipe.schedule.shape.averages_gradients:
        return
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    if trainer.args.average_tokens_across_devices and counts:
        warnings.warn(
            f"under {comm.recipe} ranks do not wait for each other in every step, but TrainingArguments("
            "average_tokens_across_devices=True), the default, gathers the number of tokens from all ranks in every step: on a slow "
            "network set it to False; each rank's loss is then the mean over its own tokens",
            stacklevel=2,
        )
    if type(loader).__name__ == "DataLoaderDispatcher":
        warnings.warn(
            f"under {comm.recipe} ranks do not wait for each other in every step, but rank 0 reads all batches and sends them to the "
            "others: set TrainingArguments(accelerator_config={'dispatch_batches': False}), so that each rank reads its own",
            stacklevel=2,
        )
