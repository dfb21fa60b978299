"""attach: one line that gives a training loop a recipe."""

import os
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gossamer.core.contracts import Quorum
from gossamer.core.errors import AttachError
from gossamer.fabrics.torch import TorchFabric
from gossamer.hosts import consensus
from gossamer.hosts.backward import Backward
from gossamer.hosts.communicator import Communicator, attached
from gossamer.hosts.handshake import compare, fingerprint
from gossamer.hosts.metrics import Meter, OnMetrics, check_callback
from gossamer.hosts.scaler import refuse_under_backups
from gossamer.hosts.steps import Steps
from gossamer.recipe import Recipe
from gossamer.worker import Worker

Buffers = Literal["average", "broadcast", "local"]


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: str | Recipe,
    process_group: "dist.ProcessGroup | DeviceMesh | None" = None,
    *,
    seed: int = 0,
    deadline: float = 300.0,
    buffers: Buffers | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
    before_step: Callable[[], None] | None = None,
    on_late: Callable[[int], None] | None = None,
    measure_every: int = 0,
    on_metrics: OnMetrics | None = None,
    metrics_every: int = 10,
) -> Communicator:
    """Give a model and its optimizer a recipe; the training loop stays as it is.

    All ranks compare their set-up first, and start from rank 0's parameters and buffers.

    - `process_group`: a group or a one-dimensional DeviceMesh; None is the default group (or this process alone).
    - `deadline`: seconds after which a missing rank is an error on all others.
    - `buffers`: what becomes of float buffers (BatchNorm statistics) when parameters are averaged; asked for then.
    - `scaler`: a GradScaler, so that memories are free of its scale and skipped steps are counted. Local schedules need it.
    - `find_unused_parameters`: agree at every step on parameters no rank used, and leave them without gradient.
    - `before_step`: called before every descent, also of missed updates under backup workers: clip gradients here then.
    - `on_late`: told the step whose gradient was dropped (backup workers).
    - `measure_every`: measure the compression error of every parameter at every so many steps.
    - `on_metrics`: called with (step, metrics) when `optimizer.step()` has done every `metrics_every`-th step; for loggers.
      `metrics` is that of `comm.metrics()`, and rates since the last report. What it raises, `optimizer.step()` raises.

    >>> model = nn.Linear(2, 1)
    >>> comm = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "terngrad")
    >>> comm.recipe, comm.step
    (scatter(ternary()), 0)
    >>> comm.detach()
    """
    parsed = Recipe.of(recipe)
    check_callback(on_metrics, metrics_every)
    _check_not_attached(model)
    named = _trainable(model, optimizer)
    policy = check(model, parsed, buffers, scaler, find_unused_parameters)
    group = _group(process_group)
    fabric = TorchFabric(group, deadline=deadline)
    try:
        worker = Worker(parsed, named, optimizer, fabric.rank, fabric.size, seed)
        if worker.stand is not None and on_late is not None:
            worker.stand.on_late = on_late
        if fabric.size > 1:
            extras = {"deadline": deadline, "buffers": policy, "find_unused_parameters": find_unused_parameters}
            fabric.run(compare(worker, fingerprint(worker, extras, model)))
            fabric.run(consensus.broadcast_model(model, worker))
        meter = Meter(worker, fabric.ledger, on_metrics, metrics_every)
        steps = Steps(model, optimizer, worker, fabric, meter, buffers=policy, scaler=scaler, before_step=before_step)
        backward = Backward(steps, find_unused=find_unused_parameters, measure_every=measure_every)
        return Communicator(steps, backward)
    except BaseException:
        fabric.close()
        raise


def check(
    model: nn.Module,
    recipe: Recipe,
    buffers: Buffers | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
) -> str:
    """Refuse what a recipe cannot do with this model and these options; returns what becomes of the model's buffers."""
    policy = _buffer_policy(model, recipe, buffers)
    _check_backups(recipe, policy, find_unused_parameters)
    refuse_under_backups(recipe, scaler)
    return policy


def _trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise AttachError("the model has no parameter that requires a gradient; there is nothing to train")
    for name, p in named.items():
        if not p.is_floating_point():
            raise AttachError(
                f"parameter {name!r} is {p.dtype}; only real floating-point parameters can be averaged: "
                "freeze it with requires_grad_(False), or keep its real and imaginary parts apart"
            )
    if not any(p.numel() for p in named.values()):
        raise AttachError("all trainable parameters of the model are empty; there is nothing to train")
    stepped = {id(p) for g in optimizer.param_groups for p in g["params"]}
    if not any(id(p) in stepped for p in named.values()):
        raise AttachError(
            "the optimizer holds none of the model's parameters; make it from model.parameters() of this very model"
        )
    strangers = stepped - {id(p) for p in model.parameters()}
    if strangers:
        raise AttachError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the model's and would never be averaged; "
            "attach one module that holds them all, such as nn.ModuleList([model, criterion])"
        )
    return named


def _group(given: "dist.ProcessGroup | DeviceMesh | None") -> "dist.ProcessGroup | None":
    if given is None:
        alone = not dist.is_initialized()
        if alone and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise AttachError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but there is no process group and this rank would train alone; "
                "call torch.distributed.init_process_group() first"
            )
        return None
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise AttachError(f"a DeviceMesh of {given.ndim} dimensions: pick one, such as mesh['data']")
        return given.get_group()
    if not isinstance(given, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(
            "process_group is no group: this process is not one of its ranks, and has nothing to attach to"
        )
    return given


def _check_not_attached(model: nn.Module) -> None:
    if model in attached:
        raise AttachError("this model is attached already; call detach() on its communicator first")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise AttachError(
            "this model is wrapped in DistributedDataParallel, which would average it a second time: "
            "attach the plain model, or use gossamer.ddp.register(ddp_model, recipe)"
        )


def _buffer_policy(model: nn.Module, recipe: Recipe, policy: Buffers | None) -> str:
    if policy is not None:
        if policy not in ("average", "broadcast", "local"):
            raise AttachError(f"buffers must be 'average', 'broadcast' or 'local', got {policy!r}")
        if recipe.schedule.mixes and policy != "local":
            raise AttachError(
                f"buffers={policy!r} under {recipe.schedule}: nobody ever waits for everybody, so buffers cannot be shared; say 'local'"
            )
        return policy
    floating = [n for n, b in model.named_buffers() if b.is_floating_point() and b.numel()]
    if floating and not recipe.schedule.averages_gradients:
        raise AttachError(
            f"the model has float buffers ({floating[0]}, ...), and under {recipe.schedule} they differ between ranks like "
            "parameters do; say buffers="
            + ("'local'" if recipe.schedule.mixes else "'average', 'broadcast' (rank 0's) or 'local'")
        )
    return "consensus"


def _check_backups(recipe: Recipe, buffers: str, find_unused: bool) -> None:
    if not isinstance(recipe.exchange, Quorum):
        return
    if buffers in ("average", "broadcast") or find_unused:
        what = "find_unused_parameters" if find_unused else f"buffers={buffers!r}"
        raise AttachError(
            f"{recipe.exchange} with {what}: that needs all ranks at every step, and late ones are not there"
        )
