"""attach: give an existing training loop a recipe, in one line."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.codecs.warm import warm
from gossamer.core.constraints import Constraint
from gossamer.core.errors import AttachError
from gossamer.core.schedule import Elastic
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.backward import Backward
from gossamer.integrations.broadcast import make_equal
from gossamer.integrations.checks.devices import device_of, refuse_devices, refuse_dtypes, refuse_lengths
from gossamer.integrations.checks.elastic_checks import refuse_members
from gossamer.integrations.checks.requirements import SCALED, UNUSED, for_all_ranks, for_buffers, for_silence_on, refuse
from gossamer.integrations.checks.wrappers import (
    model_inside,
    optimizers_of,
    refuse_engine,
    refuse_model,
    refuse_optimizers,
    refuse_strange,
    refuse_strangers,
    warn_of_unstepped,
)
from gossamer.integrations.closures import refuse_searches
from gossamer.integrations.communicator import Communicator, is_attached
from gossamer.integrations.ddp_wrapper import Passing, refuse_options
from gossamer.integrations.groups import Given, Where, between_nodes, group_of
from gossamer.integrations.handover import Untrained
from gossamer.integrations.held_model import held
from gossamer.integrations.joining import Plan, agreed, make_worker
from gossamer.integrations.metrics import Meter, OnMetrics, check_callback
from gossamer.integrations.parting import PartingAtOwnPace, PartingTogether
from gossamer.integrations.regrouping import Regrouping
from gossamer.integrations.run_events import recorded
from gossamer.integrations.run_observer import DDP, assignment_of
from gossamer.integrations.shared import SHARED, floats
from gossamer.integrations.steps import StepLoop
from gossamer.integrations.weights import agree_on_weights, check_weight, refuse_weights
from gossamer.recipe import Recipe

BufferPolicy = Literal["average", "broadcast", "local"]


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
    buffers: BufferPolicy | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
    before_step: Callable[[], None] | None = None,
    on_late: Callable[[int], None] | None = None,
    measure_every: int = 0,
    on_metrics: OnMetrics | None = None,
    metrics_every: int = 10,
    events: str | os.PathLike[str] | None = None,
) -> Communicator:
    """Attach a recipe to a model and its optimizer; the training loop stays as it is.

    All ranks first compare their set-up, then start from rank 0's parameters, buffers and optimizer state. If one rank
    refuses its arguments, all ranks raise an error.

    - `model`: a plain module, or a DistributedDataParallel model, which stops averaging by itself until `detach()`. Wrappers
      of Accelerate, Lightning and Fabric around a model or an optimizer are taken off.
    - `optimizer`: one optimizer, or a list that splits the model's parameters; a step ends when all of them have stepped.
    - `recipe`: a name, an expression, a TOML file or a `Recipe`. Default: the environment variable GOSSAMER_RECIPE.
    - `process_group`: a group or a one-dimensional DeviceMesh; None is the default group, made by `init_process_group()` before
      (or this process alone). With `gossamer.members()`, and most recipes, ranks may die and come back.
    - `nodes`: for nodes with several ranks and one network card: the number of nodes, "hosts" to group ranks by host name,
      a DeviceMesh of nodes and their ranks, or "members" where each member is a node. Ranks then average densely inside a
      node, and by the recipe between nodes.
    - `deadline`: seconds without an answer after which all other ranks raise an error about the missing rank.
    - `patience`: "alive" waits, after a warning, for a rank that is alive but busy with something else; "work" does not.
    - `weight`: this rank's weight in all averages, such as the number of samples in its batch or shard; only ratios between
      ranks matter. With batches of n samples each, the weighted mean is the gradient over all samples. Ranks that hold one
      model together (FSDP2) have one weight.
    - `buffers`: "average", "broadcast" or "local": how to treat float buffers (BatchNorm statistics). Required where the
      recipe averages parameters.
    - `scaler`: the GradScaler in use, so that memories are free of its scale and skipped steps are counted. Local schedules
      need it.
    - `find_unused_parameters`: agree at every step which parameters no rank used, and leave them without gradient.
    - `before_step`: called before every optimizer step, and before every missed update under backup workers; clip gradients
      here in that case.
    - `on_late`: called with the step number of a gradient that was dropped (backup workers).
    - `measure_every`: measure the compression error of every parameter every so many steps, or at the next step that sends.
    - `on_metrics`: called with (step, metrics) after every `metrics_every`-th `optimizer.step()`; for loggers. `metrics`
      holds `comm.metrics()` and rates since the last report. `optimizer.step()` raises what it raises. If it returns a
      dictionary, the values under "loss" and "held_out" are passed to `comm.log`.
    - `events`: a folder, the same for all ranks and all restarts of a run, in which each process writes once a second what it
      does; `gossamer goodput FOLDER` says from it what became of the time that was paid for.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> comm = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "terngrad")
    >>> comm.recipe, comm.step
    (scatter(ternary(), answer=qsgd(bits=3)), 0)
    >>> comm.detach()
    """
    check_callback(on_metrics, metrics_every)
    if scaler is not None and not scaler.is_enabled():
        scaler = None  # it changes nothing, as in a loop that has one for float16 only
    looped = model_inside(model)
    wrapper, holds = looped if isinstance(looped, DistributedDataParallel) else None, held(looped)
    model = looped
    if wrapper is not None:
        model, process_group = wrapper.module, process_group or wrapper.process_group
        find_unused_parameters |= wrapper.find_unused_parameters
    what = "attach" if wrapper is None else "attach to DDP"
    recipe, kind, process_group, deadline, patience = assignment_of(recipe, process_group, deadline, patience, what)
    if is_attached(model):  # before its groups are looked for: FSDP2's hop between replicas is taken from it already
        raise AttachError("the model is attached already; call detach() on its communicator first")
    if isinstance(process_group, Members):
        process_group.by_shard = False  # it may have joined the shards of an earlier model
    group = group_of(holds.group_of(process_group))
    if isinstance(group, Members):
        refuse_members(group, Recipe.of(recipe), nodes, scaler)
        check_weight(weight)
        group.weight = weight
        warm(Recipe.of(recipe), device_of(model))  # before others wait for this rank
    fabric, recorder, comm = None, None, None
    try:
        if isinstance(group, Members):
            holds.connect(group.size, deadline, patience)  # before others meet this rank, shard by shard
        fabric = TorchFabric(group, deadline=deadline, patience=patience, device=device_of(model))
        if not isinstance(group, Members):
            holds.connect(fabric.size, deadline, patience)
        holds.meet_others_over(fabric)
        recorder, refusal = recorded(events, fabric, holds.replica)

        def check_arguments(hosts: list[str]) -> Plan:
            check_weight(weight)
            if wrapper is not None:
                refuse_options(wrapper)
            parsed = between_nodes(Recipe.of(recipe), nodes, hosts, fabric.size, group)
            optimizers = _optimizers_for(parsed, model, optimizer)
            named = _trainable(model, optimizers)
            policy = check(model, parsed, buffers or _as_ddp_does(wrapper), scaler, find_unused_parameters)
            holds.check(named, parsed)
            if refusal is not None:
                raise refusal
            if fabric.size > 1:
                refuse_engine()
                refuse_searches(optimizers)
                refuse_devices(named, {} if policy == "local" else floats(model))
                refuse_lengths(parsed, fabric.device)
            alike = {"deadline": deadline, "buffers": policy, "find_unused_parameters": find_unused_parameters}
            return Plan(parsed, named, optimizers, alike)

        def agreed_in_a_replica(refusal: Exception | None, facts: dict[str, Any]) -> Exception | None:
            return holds.agreed(refusal, {**facts, "weight": weight, "ranks with the same shard": fabric.size})

        plan = agreed(fabric, "attach", nodes, check_arguments, agreed_in_a_replica)
        holds.take_over()
        comes = fabric.present.joins  # to others that are at work
        worker = make_worker(plan, fabric, "attach", model, seed, holds.replica)
        worker.measurement.every = measure_every
        if fabric.size > 1 and not comes:
            fabric.run(agree_on_weights(worker, weight), "attach")
            fabric.run(make_equal(model, plan.optimizers, worker), "attach")
        meter = Meter(worker, fabric.ledger, on_metrics, metrics_every)
        meter.on_late = on_late
        meter.begin(kind, recorder)
        steps = StepLoop(model, plan, worker, fabric, meter, scaler)
        steps.before_step = before_step
        backward = Backward(steps, looped, holds, find_unused=find_unused_parameters)
        comm = Communicator(steps, backward, [holds, *([] if wrapper is None or kind == DDP else [Passing(wrapper)])])
        if fabric.members is not None:
            _train_among(fabric.members, steps, comes)
        return comm
    except BaseException:
        if comm is not None:  # a rank that came could not take part
            comm.detach()
            raise
        holds.remove()
        if fabric is not None:
            fabric.close()
        if recorder is not None:
            recorder.close()
        raise


def _train_among(members: Members, steps: StepLoop, comes: bool) -> None:
    """Let the run go on when members change; one that `comes` to others at work takes over what they have agreed on."""
    worker, fabric = steps.worker, steps.fabric
    worker.untrained = Untrained(steps.model, worker)
    if isinstance(worker.recipe.schedule, Elastic):
        steps.parting = PartingAtOwnPace(steps)
    else:
        steps.parting, steps.regrouping = PartingTogether(steps, members), Regrouping(steps, comes)
    if comes:  # the others wait to hand over
        worker.ranks.regroup(fabric.present)  # one may be lost since this rank came
        if worker.ranks.weights:
            refuse_weights(worker)
        if steps.regrouping is None:
            fabric.run(worker.begin(), "attach")
        else:
            steps.regrouping.join_in()
            steps.take_part()
        steps.meter.restart()


def _optimizers_for(recipe: Recipe, model: nn.Module, given: object) -> tuple[Optimizer, ...]:
    """Return the given optimizers; refuse models and optimizers that another library averages, steps or shards."""
    refuse_model(model)
    optimizers = optimizers_of(given)
    for one in (recipe, *recipe.reached):
        refuse_optimizers(optimizers, one)
    return optimizers


def _as_ddp_does(wrapper: DistributedDataParallel | None) -> BufferPolicy | None:
    """Return the buffer policy of DDP, if there is one: "broadcast" from rank 0, unless `broadcast_buffers=False`."""
    return "broadcast" if wrapper is not None and wrapper.broadcast_buffers and any(floats(wrapper.module)) else None


def check(
    model: nn.Module,
    recipe: Recipe,
    buffers: BufferPolicy | None = None,
    scaler: Any = None,
    find_unused_parameters: bool = False,
) -> str:
    """Raise an error if the recipe does not support this model and these options; return the buffer policy."""
    if buffers not in (None, "average", "broadcast", "local"):
        raise AttachError(f"buffers must be 'average', 'broadcast' or 'local', got {buffers!r}")
    refuse(recipe, *_wants(model, buffers, scaler, find_unused_parameters))
    return buffers or "consensus"


def _wants(model: nn.Module, buffers: BufferPolicy | None, scaler: Any, find_unused: bool) -> Iterator[Constraint]:
    """Yield the constraints that the options put on a recipe."""
    if buffers in SHARED:
        yield for_buffers(buffers)
    elif buffers is None and (floating := floats(model)):
        yield from for_silence_on(next(iter(floating)))
    if find_unused:
        yield for_all_ranks("find_unused_parameters")
        yield UNUSED
    if buffers in SHARED:
        yield for_all_ranks(f"buffers={buffers!r}")
    if scaler is not None:
        yield from SCALED


def _trainable(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters to train, by name; raise an error if they or the optimizers do not fit."""
    named: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise AttachError("the model has no parameter that requires a gradient; there is nothing to train")
    refuse_dtypes(named)
    if not any(p.numel() for p in named.values()):  # of a DTensor, the elements of all shards
        raise AttachError("all trainable parameters of the model have zero elements; there is nothing to train")
    refuse_strange(named, optimizers)
    refuse_strangers(model, optimizers)
    warn_of_unstepped(named, optimizers, stacklevel=5)
    return named
