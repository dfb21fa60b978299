"""Wrappers of other libraries: those that only call are taken off; those that average, shard or never step are refused."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.integrations.checks.introspection import kind_names, living
from gossamer.recipe import Recipe

DDP, FSDP, FSDP2, DEEPSPEED = "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"
DATA_PARALLEL = "DataParallel"
OUT_OF_DDP = "attach the DDP model itself, gossamer.attach(ddp_model, optimizer, recipe), or register it: gossamer.ddp.register(ddp_model, recipe)"
LOOKS = (1, 2, 16)  # backward passes after attach at which to search for wrappers

# By the wrapper's class: the attribute that holds what it wraps.
AROUND_MODELS = {"_FabricModule": "_forward_module"}
AROUND_OPTIMIZERS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}


def model_inside(model: nn.Module) -> nn.Module:
    """Return the module that a trainer's wrapper calls: the plain module, or DDP around it."""
    return _inside(model, AROUND_MODELS)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside of those that torch.compile has put around it."""
    return _inside(model, {"OptimizedModule": "_orig_mod"})


def optimizer_inside(optimizer: Any) -> Any:
    """Return the optimizer of torch that a trainer's wrapper steps. The wrapper itself cannot take hooks."""
    return _inside(optimizer, AROUND_OPTIMIZERS)


def _inside(wrapped: Any, known: dict[str, str]) -> Any:
    while names := kind_names(type(wrapped)) & known.keys():
        wrapped = getattr(wrapped, known[names.pop()])
    return wrapped


def is_fsdp2(module: nn.Module) -> bool:
    return FSDP2 in kind_names(type(module))


def refuse_model(model: nn.Module) -> None:
    """Refuse a model that another library averages or shards."""
    for name, module in model.named_modules():
        where = f"the model's {name!r}" if name else "this model"
        kinds = kind_names(type(module))
        if DDP in kinds:
            raise AttachError(
                f"{where} is wrapped in DistributedDataParallel, which would average it a second time: {OUT_OF_DDP}"
            )
        if DATA_PARALLEL in kinds:
            raise AttachError(
                f"{where} is wrapped in DataParallel, by which one process trains on several GPUs in threads: start one process per GPU, "
                "with torchrun --nproc-per-node, and attach the plain model"
            )
        if DEEPSPEED in kinds:
            raise AttachError(
                f"{where} is a DeepSpeedEngine, which averages and steps by itself: attach the plain model with an "
                "optimizer of torch.optim, without deepspeed.initialize"
            )
        if FSDP in kinds:
            raise AttachError(_sharded(where, "FullyShardedDataParallel"))
    if any(map(is_fsdp2, model.modules())):
        return  # `fsdp.py` looks at it
    for name, parameter in model.named_parameters():
        if "DTensor" in kind_names(type(parameter)):
            raise AttachError(_sharded(f"parameter {name!r}", "tensor parallelism (it is a DTensor)"))


def refuse_engine() -> None:
    """Refuse compiled autograd: it runs gradient hooks when it compiles, not when gradients are computed."""
    if getattr(sys.modules.get("torch._dynamo.config"), "compiled_autograd", False):
        raise AttachError(
            "torch._dynamo.config.compiled_autograd is on, under which gradient hooks do not run at each step: switch it off; "
            "torch.compile of the model itself is supported"
        )


def refuse_capture(device: torch.device) -> None:
    """Refuse CUDA graph capture: a graph records kernels, not the work of threads and of the network."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise AttachError(
            "a CUDA graph is being captured, and a step that communicates with other ranks cannot be replayed from it: leave "
            "backward() and optimizer.step() out of the graph"
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], recipe: Recipe) -> None:
    """Refuse optimizers with which a recipe would have no effect, or another effect than documented."""
    local = not recipe.schedule.shape.averages_gradients
    parted = any("parts models" in one.traits for one in recipe.parts())
    for optimizer in optimizers:
        kinds = kind_names(type(optimizer))
        if (local or parted) and "ZeroRedundancyOptimizer" in kinds:
            raise AttachError(
                f"ZeroRedundancyOptimizer steps some parameters on each rank and sends them to the other ranks, so under "
                f"{recipe.memory if parted else recipe.schedule} models would never be averaged: use the plain optimizer, or a recipe "
                "that averages gradients"
            )
        if (not local or recipe.schedule.averages(1)) and "SparseAdam" in kinds:
            raise AttachError(
                "SparseAdam takes only sparse gradients, but averaged gradients are dense: use Adam, or a recipe with local steps"
            )
        if "Muon" in kinds and not any(p.dim() > 1 for group in optimizer.param_groups for p in group["params"]):
            raise AttachError(
                "Muon without matrices: it makes the momentum of each matrix orthogonal, and holds vectors only; give it the weights of "
                "hidden layers, and all else to AdamW: attach(model, [muon, adamw], recipe)"
            )
        if hasattr(optimizer, "second_step") and isinstance(getattr(optimizer, "base_optimizer", None), Optimizer):
            raise AttachError(
                f"{type(optimizer).__name__} has a first_step() and a second_step(), and step() may never be called: give attach "
                "its base_optimizer, and run the first backward under comm.no_sync()"
            )


def optimizers_of(given: object, to: str = "attach") -> tuple[Optimizer, ...]:
    """Return the given optimizers as a tuple; if one is not an optimizer, the error says what to pass instead."""
    several = tuple(map(optimizer_inside, given if isinstance(given, list | tuple) else [given]))
    for each in several:
        inner = getattr(each, "optimizer", None)
        if isinstance(inner, Optimizer):
            raise AttachError(
                f"optimizer is wrapped in a {type(each).__name__}: give {to} the inner optimizer, optimizer.optimizer"
            )
        if not isinstance(each, Optimizer):
            raise AttachError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got a {type(each).__name__}; "
                "pass one such as torch.optim.AdamW(model.parameters())"
            )
    if not several or len({id(o) for o in several}) < len(several):
        raise AttachError(
            "optimizer must be one optimizer, or a list of different optimizers; this list is empty or repeats one"
        )
    return several  # pyright: ignore[reportReturnType]


def refuse_strange(named: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold none of the model's parameters."""
    stepped = stepped_by(optimizers)
    if not any(id(p) in stepped for p in named.values()):
        raise AttachError(
            "the optimizer holds none of the model's parameters; make it from model.parameters() of the model that you attach"
        )


def refuse_strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold parameters of other modules too."""
    strangers = stepped_by(optimizers) - {id(p) for p in model.parameters()}
    if strangers:
        raise AttachError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not in the model and would never be averaged; "
            "attach one module that holds all parameters, such as nn.ModuleList([model, criterion])"
        )


def warn_of_unstepped(
    named: Mapping[str, Tensor], optimizers: Sequence[Optimizer], to: str = "attach", stacklevel: int = 3
) -> None:
    """Warn of parameters that are averaged but not in any optimizer."""
    stepped = stepped_by(optimizers)
    idle = [n for n, p in named.items() if id(p) not in stepped]
    if idle:
        warnings.warn(
            f"no optimizer given to {to} steps {idle[0]!r}"
            + (f" and {len(idle) - 1} more parameters" if len(idle) > 1 else "")
            + f"; freeze parameters that should not train with requires_grad_(False), and give {to} all optimizers, as a list",
            stacklevel=stacklevel + 1,
        )


def stepped_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return the ids of the parameters that the optimizers hold."""
    return {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}


def held_by(optimizers: Sequence[Optimizer]) -> int:
    """Return the number of parameters that the optimizers hold."""
    return sum(len(group["params"]) for o in optimizers for group in o.param_groups)


def refuse_ran_wrapper(model: nn.Module, attached: nn.Module) -> None:
    """Refuse a model that has run inside another wrapper than the `attached` one, which averages nothing.

    This searches all modules of the process.
    """
    mine = {id(p) for p in model.parameters()}
    for wrapper in living({DDP, FSDP, DEEPSPEED}):
        if wrapper is attached or not any(id(p) in mine for p in wrapper.parameters()):
            continue
        if DDP not in kind_names(type(wrapper)):
            raise AttachError(_sharded("this model", type(wrapper).__name__))
        # Under its no_sync() too: it averages later, after the last search.
        if getattr(wrapper, "_lazy_init_ran", True):
            raise AttachError(
                "the model is attached and also runs inside DistributedDataParallel, which averages densely first: "
                + OUT_OF_DDP
            )


def _sharded(what: str, how: str) -> str:
    return (
        f"{what} is sharded by {how}, and gossamer averages whole parameters, or those that torch's fully_shard cuts: attach the "
        "plain model, or shard it with fully_shard over a part of the ranks"
    )
