"""ddp: register a recipe as the communication hook of a DistributedDataParallel model."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossamer.checkpoints import state as checkpoints
from gossamer.core.errors import AttachError
from gossamer.core.torch_private import private_name
from gossamer.fabrics.liveness.heartbeat import Patience
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations import consensus
from gossamer.integrations.checks.devices import device_of, refuse_devices, refuse_lengths
from gossamer.integrations.checks.loop_warnings import LoopWarnings
from gossamer.integrations.checks.requirements import ADDED, HOOK, HOOK_ALONE, refuse
from gossamer.integrations.checks.wrappers import optimizers_of, refuse_strange, warn_of_unstepped
from gossamer.integrations.communicator import is_attached
from gossamer.integrations.ddp_wrapper import syncs
from gossamer.integrations.grad_buckets import GradBuckets
from gossamer.integrations.grad_scaler import KnownScale
from gossamer.integrations.groups import Where, between_nodes
from gossamer.integrations.joining import Plan, agreed, make_worker
from gossamer.integrations.metrics import Meter, OnMetrics, Told, check_callback
from gossamer.integrations.run_events import recorded
from gossamer.integrations.run_facts import RunFacts
from gossamer.integrations.run_observer import DDP, assignment_of
from gossamer.kernels.finite import all_finite
from gossamer.recipe import Recipe
from gossamer.runtime import Worker

_handed_over: Any = private_name(
    DistributedDataParallel, "_build_params_for_reducer", "lists the parameters that DDP passes to a hook"
)
_told_of: Any = private_name(
    DistributedDataParallel, "_get_ddp_logging_data", "counts the parameters that DDP averages"
)
ANEW = "requires_grad changed after DDP was made: make the DDP model again, then register"


class Hook(RunFacts):
    """Runs a recipe on the gradients in DDP's buckets.

    DDP regroups its buckets after the first step; gossamer's buckets stay as they are.
    """

    def __init__(
        self, ddp_model: DistributedDataParallel, worker: Worker, fabric: TorchFabric, scaler: Any, meter: Meter
    ) -> None:
        super().__init__(worker, fabric, meter)
        self.model, self.ignored = ddp_model.module, frozenset[str](ddp_model.parameters_to_ignore)
        self._scale = None if scaler is None else KnownScale(scaler)
        self.names = {id(param.parameter): name for name, param in worker.params.items()}
        self.intake = GradBuckets(worker, self._launch)
        self.waiting: list[tuple[list[Tensor], list[str], Future[Tensor], Tensor]] = []
        self._doubts, self._looks = LoopWarnings(worker), {*range(worker.step + 1, worker.step + 9)}  # looked at
        self._ddp, self._largest = ddp_model, max(worker.params.values(), key=lambda param: param.parameter.numel())
        self._handles: list[Any] = [] if self._scale is None else [self._scale]
        self._handles.append(self._largest.parameter.register_hook(self._begin_pass))
        # A communication hook does not see the optimizer, so watch the steps of all optimizers, but only if metrics are wanted.
        watches = any(each is not None for each in (meter.on_metrics, meter.observer, meter.events))
        self._handles += [register_optimizer_step_post_hook(self._after_step)] if watches else []

    def check_sync(self) -> None:
        """Compare hashes of all parameters between ranks, between steps; the error names those that differ."""
        if self.fabric.size > 1:
            program = consensus.check(self.worker, self.model, {}, self.ignored)
            self.fabric.run(program, "hook.check_sync", self.worker.step - 1)

    def log(self, *, loss: Told = None, held_out: Told = None) -> None:
        """Log the training loss or a quality on held-out data, as `Communicator.log` does."""
        self.meter.log(loss, held_out)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain tensors and scalars; save one per rank, between steps."""
        return checkpoints.save(self.worker)

    def load_state_dict(self, saved: Any) -> None:
        """Load a `state_dict`; after a change of world size, give the dictionaries of all old ranks."""
        checkpoints.load(self.worker, saved)
        self.intake = GradBuckets(self.worker, self._launch)
        self._looks = {*range(self.worker.step + 1, self.worker.step + 9)}
        self.meter.restart()

    def close(self) -> None:
        """End the comm thread. DDP cannot remove a hook: to train on, take the model out of DDP."""
        for handle in self._handles:
            handle.remove()
        self.fabric.close()
        self.meter.end()

    def take(self, bucket: Any) -> Future[Tensor]:
        """Collect the gradients of one DDP bucket; return a future of the averaged bucket."""
        buffer = bucket.buffer()
        promise = _promise_of(buffer)
        if self.fabric.size == 1:
            self.worker.step += int(bucket.is_last())
            promise.set_result(buffer)
            return promise
        if not self.intake.arrived:
            self.worker.averaging.means = []
            self.worker.scale = 1.0 if self._scale is None else self._scale.now()
        names = [self._name_of(p) for p in bucket.parameters()]
        gradients = [buffer] if buffer.is_sparse else list(bucket.gradients())  # a sparse one has its own bucket
        self.waiting.append((gradients, names, promise, buffer))
        for name, gradient in zip(names, gradients, strict=True):
            self.intake.take(name, gradient)
        if len(self.intake.arrived) == len(self.intake.slots):
            self._deliver()
        elif bucket.is_last():  # DDP would now wait forever for futures that are never completed
            missing = ", ".join(sorted(self.intake.slots.keys() - self.intake.arrived)[:5])
            raise AttachError(f"no DDP bucket of this backward holds {missing}; {ANEW}")
        return promise

    def _name_of(self, parameter: Tensor) -> str:
        name = self.names.get(id(parameter))
        if name is None:
            raise AttachError(
                f"DDP passes a parameter of shape {tuple(parameter.shape)} that it did not have at register; {ANEW}"
            )
        return name

    def _begin_pass(self, arriving: Tensor) -> None:
        """Look whether a pass adds to averaged gradients. A loop does so in its first steps, or never."""
        if self.worker.step in self._looks and self.fabric.size > 1:
            if (held := self._largest.gradient) is None or not bool(held.any()):
                self._looks.remove(self.worker.step)  # what later passes of this step add to is not averaged
            elif syncs(self._ddp):
                refuse(self.worker.recipe, ADDED)
                self._doubts.never_stepped(thrown_away=False)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self.names for group in optimizer.param_groups for p in group["params"]):
            self.meter.step_ended()

    def _launch(self, index: int, flat: Tensor) -> None:
        self.fabric.run(self.worker.ready(index, flat))

    @torch.no_grad()
    def _deliver(self) -> None:
        """Wait for the means, write them into DDP's buckets, and complete all futures.

        It runs in the thread of backward, after the last gradient: an exception then ends backward, while DDP would wait
        forever for a future that is never completed.
        """
        buckets = self.worker.buckets
        waiting, self.waiting = self.waiting, []
        self.intake.reset()
        with self.fabric.during("backward", self.worker.step):
            with self.fabric.standstill.counted():
                self.fabric.run(self.worker.averaging.wait_gradients())
            if not self.worker.averaging.finite:
                own = [g.coalesce().values() if g.is_sparse else g for gradients, *_ in waiting for g in gradients]
                self.fabric.run(self.worker.averaging.name_spoilers(all_finite(own)))
        means = self.worker.by_name(self.worker.averaging.means)
        answers = [_put(gradients, [means[n] for n in names], buffer) for gradients, names, _, buffer in waiting]
        self.worker.end_step()
        if self.worker.buckets is not buckets:
            self.intake = GradBuckets(self.worker, self._launch)
        for (*_, promise, _), answer in zip(waiting, answers, strict=True):
            promise.set_result(answer)


def _promise_of(buffer: Tensor) -> Future[Tensor]:
    """Make a future for a buffer; on a GPU, waiting for it also waits for the stream that completed it."""
    return Future(devices=[buffer.device]) if buffer.is_cuda else Future()


def _put(gradients: list[Tensor], means: list[Tensor], buffer: Tensor) -> Tensor:
    """Return the means of one DDP bucket: written into its buffer, or as a sparse tensor if the buffer is sparse."""
    if buffer.is_sparse:
        return means[0].to(buffer.dtype).to_sparse(buffer.sparse_dim())
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean)
    return buffer


def register(
    ddp_model: DistributedDataParallel,
    recipe: str | Recipe | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    *,
    nodes: Where | None = None,
    seed: int = 0,
    deadline: float = 300.0,
    patience: Patience = "alive",
    scaler: Any = None,
    on_metrics: OnMetrics | None = None,
    metrics_every: int = 10,
    events: str | os.PathLike[str] | None = None,
    optimizer: "Optimizer | Sequence[Optimizer] | None" = None,
) -> Hook:
    """Replace DDP's all-reduce by a recipe; for recipes that average gradients at every step.

    Call it once, before the first backward. Pass the `optimizer` (or a list of them) if the recipe uses learning rates, as
    accordion and dqsgd do: a hook cannot see them otherwise, and such recipes are refused. Pass a GradScaler as `scaler`, so
    that memories are free of its scale. The returned `Hook` holds the state: save its `state_dict()` per rank. `nodes` and
    `on_metrics` are as in `attach`: `on_metrics` is called with (step, metrics) after every `metrics_every`-th step of the
    optimizer. Without a recipe, the environment variable GOSSAMER_RECIPE names it; "ddp" there means plain DDP, and
    "compute" no averaging at all. `events` is a folder for `gossamer goodput`, as in `attach`.
    """
    check_callback(on_metrics, metrics_every)
    named = _averaged(ddp_model)
    given = process_group or ddp_model.process_group
    recipe, kind, group, deadline, patience = assignment_of(recipe, given, deadline, patience, "register")
    optimizers = () if optimizer is None else optimizers_of(optimizer, "register")
    fabric = TorchFabric(group, deadline=deadline, patience=patience, device=device_of(ddp_model.module))
    recorder, refusal = recorded(events, fabric)

    def check_arguments(hosts: list[str]) -> Plan:
        if refusal is not None:
            raise refusal
        parsed = Recipe.of(recipe)  # here, where all ranks hear of a file that one of them cannot read
        check(parsed, sees_rates=bool(optimizers))
        leveled = between_nodes(parsed, nodes, hosts, fabric.size, group)
        if optimizers:
            refuse_strange(named, optimizers)
            warn_of_unstepped(named, optimizers, "register", stacklevel=4)
        if fabric.size > 1:
            refuse_devices(named, {})
            refuse_lengths(leveled, next(iter(named.values())).device)
        return Plan(leveled, named, optimizers, {"deadline": deadline})

    try:
        plan = agreed(fabric, "register", nodes, check_arguments)
        worker = make_worker(plan, fabric, "register", ddp_model.module, seed)
    except BaseException:
        fabric.close()
        if recorder is not None:
            recorder.close()
        raise
    meter = Meter(worker, fabric.ledger, on_metrics, metrics_every)
    meter.begin(kind, recorder)
    hook = Hook(ddp_model, worker, fabric, scaler, meter)
    ddp_model.register_comm_hook(hook, _torchs_own(given) if kind == DDP else gossamer_hook)
    return hook


def _averaged(ddp_model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters whose gradients DDP passes to a hook; refuse a DDP model that averages others as well."""
    if not isinstance(ddp_model, DistributedDataParallel):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError("register takes a DistributedDataParallel model; for a plain model use gossamer.attach")
    if is_attached(ddp_model.module):
        raise AttachError("the model is attached and would be averaged twice; call detach() on its communicator first")
    if ddp_model._comm_hooks:
        raise AttachError("the DDP model has a hook already, and DDP takes only one; make the DDP model again")
    if ddp_model._delay_all_reduce_params:
        raise AttachError(
            "DDP averages its delay_all_reduce_named_params itself, uncompressed, without calling the hook; "
            "make the DDP model without that argument"
        )
    # Use DDP's own list: it matches the names of ignored parameters in its own way.
    handed = {id(p) for p in _handed_over(ddp_model)[0]}
    if len(handed) != _told_of(ddp_model)["num_parameter_tensors"]:
        raise AttachError(f"the parameters that DDP averages are not those that require a gradient now; {ANEW}")
    return {n: p for n, p in ddp_model.module.named_parameters() if id(p) in handed}


def check(recipe: Recipe, sees_rates: bool = False) -> None:
    """Raise an error if a communication hook cannot run the recipe; it `sees_rates` if it has the optimizer."""
    refuse(recipe, *HOOK, *(() if sees_rates else HOOK_ALONE))


def gossamer_hook(state, bucket):  # type: ignore[no-untyped-def]  # pyright: ignore
    """The hook: DDP requires a plain function with a second argument `bucket` without annotation."""
    return state.take(bucket)


def _torchs_own(group: Any) -> Callable[[Any, Any], Any]:
    """Make a hook that averages as DDP does without one, and counts steps."""

    def plain_hook(state, bucket):  # type: ignore[no-untyped-def]  # pyright: ignore
        state.worker.step += int(bucket.is_last())
        return default_hooks.allreduce_hook(group, bucket)

    return plain_hook


__all__ = ["Hook", "register"]
