"""Strangers: other people's wrappers and optimizers that average too, shard, or never step; found before they do harm."""

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.recipe import Recipe

DDP, FSDP, FSDP2, DEEPSPEED = "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"
OUT_OF_DDP = "attach the DDP model itself, gossamer.attach(ddp_model, optimizer, recipe), or register it: gossamer.ddp.register(ddp_model, recipe)"
LOOKS = (1, 2, 16)  # the backward passes after attach at which wrappers are looked for


def refuse_model(model: nn.Module) -> None:
    """A model that is averaged or sharded by somebody else already."""
    for name, module in model.named_modules():
        where = f"the model's {name!r}" if name else "this model"
        kinds = _kinds(type(module))
        if DDP in kinds:
            raise AttachError(
                f"{where} is wrapped in DistributedDataParallel, which would average it a second time: {OUT_OF_DDP}"
            )
        if DEEPSPEED in kinds:
            raise AttachError(
                f"{where} is a DeepSpeedEngine, which averages and steps by itself: attach the plain model with an "
                "optimizer of torch.optim, and leave deepspeed.initialize out"
            )
        if FSDP in kinds or FSDP2 in kinds:
            raise AttachError(_sharded(where, "FSDP"))
    for name, parameter in model.named_parameters():
        if "DTensor" in _kinds(type(parameter)):
            raise AttachError(_sharded(f"parameter {name!r}", "a DTensor (fully_shard or tensor parallelism)"))


def refuse_engine() -> None:
    """Compiled autograd, where torch says that it is on: it runs hooks when it compiles, and not when gradients come."""
    if getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False):
        raise AttachError(
            "torch._dynamo.config.compiled_autograd is on, under which no hook sees gradients come: switch it off; "
            "torch.compile of the model itself is fine"
        )


def refuse_capture(device: torch.device) -> None:
    """A CUDA graph holds what is launched, and nothing of what threads and the network do besides."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "a CUDA graph is being captured, and a step that talks to other ranks cannot be replayed from one: leave "
            "backward() and optimizer.step() out of the graph"
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], recipe: Recipe) -> None:
    """Optimizers with which a recipe would do nothing, or something else than it says."""
    local = not recipe.schedule.averages_gradients
    parted = any("parts models" in one.traits for one in recipe.parts())
    for optimizer in optimizers:
        kinds = _kinds(type(optimizer))
        if (local or parted) and "ZeroRedundancyOptimizer" in kinds:
            raise AttachError(
                f"ZeroRedundancyOptimizer steps a part of the parameters on each rank and sends them to the others, so under "
                f"{recipe.memory if parted else recipe.schedule} models would never be averaged: use the plain optimizer, or a recipe "
                "that averages gradients"
            )
        if not local and "SparseAdam" in kinds:
            raise AttachError(
                "SparseAdam takes sparse gradients only, and averaged ones are dense: use Adam, or a recipe with local steps"
            )
        if hasattr(optimizer, "second_step") and isinstance(getattr(optimizer, "base_optimizer", None), Optimizer):
            raise AttachError(
                f"{type(optimizer).__name__} has a first and a second step, and its step() need never come: give attach its "
                "base_optimizer, and run the first backward under comm.no_sync()"
            )


def optimizers_of(given: object) -> tuple[Optimizer, ...]:
    """One optimizer or several; and of what is none, what to give instead."""
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, Optimizer):
            raise AttachError(
                f"a {type(each).__name__} is around the optimizer: give attach the optimizer itself, optimizer.optimizer"
            )
        if not isinstance(each, Optimizer):
            raise AttachError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got a {type(each).__name__}; "
                "such as torch.optim.AdamW(model.parameters())"
            )
    if not several or len({id(o) for o in several}) < len(several):
        raise AttachError(
            "optimizer must be one optimizer, or a list of different ones; this list is empty or repeats one"
        )
    return several  # pyright: ignore[reportReturnType]


def refuse_ran_wrapper(model: nn.Module) -> None:
    """A wrapper that was put around the model, or was around it all the time, and that has run.

    Wrappers leave no mark on what they wrap, so all living objects are looked through: some 20 ms.
    """
    mine = {id(p) for p in model.parameters()}
    for wrapper in _living({DDP, FSDP, DEEPSPEED}):
        if not any(id(p) in mine for p in wrapper.parameters()):
            continue
        if DDP not in _kinds(type(wrapper)):
            raise AttachError(_sharded("this model", type(wrapper).__name__))
        if getattr(
            wrapper, "_lazy_init_ran", True
        ):  # under its no_sync() too: it will average later, when nobody looks
            raise AttachError(
                "this model is attached and runs inside of DistributedDataParallel as well, whose dense average comes first: "
                + OUT_OF_DDP
            )


def _living(names: set[str]) -> Iterable[Any]:
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if names & _kinds(kind)}
    return [o for o in objects if type(o) in kinds] if kinds else []


def _kinds(kind: type) -> set[str]:
    """By name, so that nobody's package need be loaded."""
    return {base.__name__ for base in kind.__mro__}


def _sharded(what: str, how: str) -> str:
    return (
        f"{what} is sharded by {how}, and gossamer averages whole parameters: attach the plain model, "
        "without fully_shard, FSDP or tensor parallelism; sharded models are not supported yet"
    )
