"""attach: one line that gives a training loop a recipe."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.codecs.warm import warm
from gossamer.core.constraints import Constraint
from gossamer.core.errors import AttachError, GossamerError
from gossamer.fabrics.heartbeat import Patience
from gossamer.fabrics.members import Members
from gossamer.fabrics.torch import TorchFabric
from gossamer.integrations.backward import Backward
from gossamer.integrations.broadcast import hyperparameters, make_equal
from gossamer.integrations.closures import refuse_searches
from gossamer.integrations.communicator import Communicator, attached
from gossamer.integrations.ddp_wrapper import Passing, refuse_options, wrapper_of
from gossamer.integrations.devices import device_of, refuse_devices, refuse_lengths, shared_buffers
from gossamer.integrations.elastic_checks import Untrained, compare_with_the_first, post_fingerprint, refuse_members
from gossamer.integrations.groups import Given, group_of
from gossamer.integrations.handshake import agree, compare, fingerprint
from gossamer.integrations.metrics import Meter, OnMetrics, check_callback
from gossamer.integrations.nodes import Where, between_nodes, host_names
from gossamer.integrations.requirements import SCALED, UNUSED, for_all_ranks, for_buffers, for_silence_on, refuse
from gossamer.integrations.run_observer import DDP, assignment_of
from gossamer.integrations.shared import floats
from gossamer.integrations.steps import StepLoop
from gossamer.integrations.weights import agree_on_weights, check_weight
from gossamer.integrations.wrappers import (
    optimizers_of,
    refuse_model,
    refuse_optimizers,
    refuse_strange,
    stepped_by,
    warn_of_unstepped,
)
from gossamer.recipe import Recipe
from gossamer.runtime import Together, Worker, params_of

MemoryPool = Literal["average", "broadcast", "local"]


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    recipe: str | Recipe | None = None,
    process_group: Given = None,
    *,
    nodes: Where | None = None,
    seed: int = 0,
    deadline: float = 300.0,
    patience: Patience = "alive",
    weight: float = 1.0,
    buffers: MemoryPool | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
    before_step: Callable[[], None] | None = None,
    on_late: Callable[[int], None] | None = None,
    measure_every: int = 0,
    on_metrics: OnMetrics | None = None,
    metrics_every: int = 10,
) -> Communicator:
    """Give a model and its optimizer a recipe; the training loop stays as it is.

    All ranks compare their set-up first, and start from rank 0's parameters, buffers and optimizer state. What is refused on
    one rank is an error on all.

    - `model`: a plain one, or one in DistributedDataParallel, whose own average ends until `detach()`.
    - `recipe`: a name, an expression, a TOML file or a `Recipe`; left out, it is what the environment's GOSSAMER_RECIPE says.
    - `optimizer`: one, or a list of those that share the model's parameters among them; a step is over when all have stepped.
    - `process_group`: a group or a one-dimensional DeviceMesh; None is the default group (or this process alone). With
      `gossamer.members()`, and a recipe that goes on without a rank, ranks may die and come back.
    - `nodes`: where several ranks share a node and its network card: how many nodes there are, "hosts" to go by their names,
      or a DeviceMesh of nodes and their ranks. They then average densely inside, and by the recipe between nodes.
    - `deadline`: seconds of silence after which a missing rank is an error on all others.
    - `patience`: "alive" waits, after a warning, for a rank that lives but works elsewhere; "work" does not.
    - `weight`: what this rank's data count in all averages, such as how many samples its batch or its shard has; only what
      ranks have in proportion matters. With batches of n samples each the weighted mean is the gradient of all of them.
    - `buffers`: what becomes of float buffers (BatchNorm statistics) when parameters are averaged; asked for then.
    - `scaler`: a GradScaler, so that memories are free of its scale and skipped steps are counted. Local schedules need it.
    - `find_unused_parameters`: agree at every step on parameters no rank used, and leave them without gradient.
    - `before_step`: called before every descent, also of missed updates under backup workers: clip gradients here then.
    - `on_late`: told the step whose gradient was dropped (backup workers).
    - `measure_every`: measure the compression error of every parameter after every so many steps; where nothing is sent
      then, at the next step that sends.
    - `on_metrics`: called with (step, metrics) when `optimizer.step()` has done every `metrics_every`-th step; for loggers.
      `metrics` is that of `comm.metrics()`, and rates since the last report. What it raises, `optimizer.step()` raises.
      If it returns a dictionary, its "loss" and "held_out" are told as by `comm.log`.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> comm = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "terngrad")
    >>> comm.recipe, comm.step
    (scatter(ternary(), answer=qsgd(bits=3)), 0)
    >>> comm.detach()
    """
    check_callback(on_metrics, metrics_every)
    looped, wrapper = model, wrapper_of(model)
    if wrapper is not None:
        model, process_group = wrapper.module, process_group or wrapper.process_group
        find_unused_parameters |= wrapper.find_unused_parameters
    what = "attach" if wrapper is None else "attach to DDP"
    recipe, kind, process_group, deadline, patience = assignment_of(recipe, process_group, deadline, patience, what)
    group = group_of(process_group)
    if isinstance(group, Members):
        refuse_members(Recipe.of(recipe), nodes, weight)
    fabric = TorchFabric(group, deadline=deadline, patience=patience, device=device_of(model))
    try:
        given, refusal = None, None
        hosts = host_names(fabric) if nodes == "hosts" else []
        try:
            check_weight(weight)
            if wrapper is not None:
                refuse_options(wrapper)
                buffers = buffers or _as_ddp_does(wrapper)
            parsed = between_nodes(
                Recipe.of(recipe), nodes, hosts, fabric.size, None if isinstance(group, Members) else group
            )
            given = _given(model, optimizer, parsed, buffers, scaler, find_unused_parameters)
            if fabric.size > 1:
                refuse_searches(given[1])
                refuse_devices(given[2], shared_buffers(model, given[3]))
                refuse_lengths(given[0], fabric.device)
        except (GossamerError, TypeError) as error:
            refusal = error
        if fabric.size > 1 and not fabric.present.joins:
            fabric.run(agree(refusal, fabric.device), "attach")
        if refusal is not None:
            raise refusal
        assert given is not None
        parsed, optimizers, named, policy = given
        comes = fabric.present.joins  # to others that are at work
        joint = optimizers[0] if len(optimizers) == 1 else Together(optimizers)
        worker = Worker(parsed, params_of(named), joint, fabric.rank, fabric.size, seed)
        worker.regroup(fabric.present)
        worker.untrained = Untrained(model, worker) if fabric.members else None
        worker.measure_every = measure_every
        worker.on_late = on_late
        if fabric.size > 1:
            # Now, and not within the first step, which has a deadline.
            warm(parsed, fabric.device, worker.buckets[0].layout.dtype)
            extras = {"deadline": deadline, "buffers": policy, "find_unused_parameters": find_unused_parameters}
            facts = fingerprint(worker, extras | hyperparameters(optimizers), model)
            if comes:
                compare_with_the_first(worker, facts, fabric)
            else:
                fabric.run(compare(worker, facts), "attach")
                fabric.run(agree_on_weights(worker, weight), "attach")
                fabric.form(parsed.groups(fabric.size), parsed.ranks_per_node)
                fabric.run(make_equal(model, optimizers, worker), "attach")
                post_fingerprint(worker, facts, fabric)
        meter = Meter(worker, fabric.ledger, on_metrics, metrics_every)
        meter.begin(kind)
        steps = StepLoop(
            model, optimizers, worker, fabric, meter, buffers=policy, scaler=scaler, before_step=before_step
        )
        backward = Backward(steps, looped, find_unused=find_unused_parameters)
        comm = Communicator(steps, backward, [] if wrapper is None or kind == DDP else [Passing(wrapper)])
        if comes:
            fabric.run(worker.begin(), "attach")  # the others wait to hand over what they have agreed on
            meter.restart()
        return comm
    except BaseException:
        fabric.close()
        raise


def _as_ddp_does(wrapper: DistributedDataParallel) -> MemoryPool | None:
    """DDP gives all ranks rank 0's buffers, unless it was told not to."""
    return "broadcast" if wrapper.broadcast_buffers and any(floats(wrapper.module)) else None


def _given(
    model: nn.Module,
    optimizer: object,
    parsed: Recipe,
    buffers: MemoryPool | None,
    scaler: Any,
    find_unused: bool,
) -> tuple[Recipe, tuple[Optimizer, ...], dict[str, Tensor], str]:
    """What this rank was given, read and found fit for one another."""
    if model in attached:
        raise AttachError("this model is attached already; call detach() on its communicator first")
    refuse_model(model)
    optimizers = optimizers_of(optimizer)
    for one in (parsed, *parsed.reached):
        refuse_optimizers(optimizers, one)
    named = _trainable(model, optimizers)
    return parsed, optimizers, named, check(model, parsed, buffers, scaler, find_unused)


def check(
    model: nn.Module,
    recipe: Recipe,
    buffers: MemoryPool | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
) -> str:
    """Refuse what a recipe cannot do with this model and these options; returns what becomes of the model's buffers."""
    if buffers not in (None, "average", "broadcast", "local"):
        raise AttachError(f"buffers must be 'average', 'broadcast' or 'local', got {buffers!r}")
    refuse(recipe, *_wants(model, buffers, scaler, find_unused_parameters))
    return buffers or "consensus"


def _wants(model: nn.Module, buffers: MemoryPool | None, scaler: Any, find_unused: bool) -> Iterator[Constraint]:
    """The terms of what was asked for."""
    floating = [n for n, b in model.named_buffers() if b.is_floating_point() and b.numel()]
    if buffers in ("average", "broadcast"):
        yield for_buffers(buffers)
    elif buffers is None and floating:
        yield from for_silence_on(floating[0])
    if find_unused:
        yield for_all_ranks("find_unused_parameters")
        yield UNUSED
    if buffers in ("average", "broadcast"):
        yield for_all_ranks(f"buffers={buffers!r}")
    if scaler is not None:
        yield from SCALED


def _trainable(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
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
    refuse_strange(named, optimizers)
    strangers = stepped_by(optimizers) - {id(p) for p in model.parameters()}
    if strangers:
        raise AttachError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the model's and would never be averaged; "
            "attach one module that holds them all, such as nn.ModuleList([model, criterion])"
        )
    warn_of_unstepped(named, optimizers)
    return named
