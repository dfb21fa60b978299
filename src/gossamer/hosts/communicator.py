"""The communicator: a worker, a fabric, and the hooks that tie them to a training loop."""

import contextlib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from gossamer.core.errors import AttachError, CheckpointError
from gossamer.core.verbs import Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.torch import TorchFabric
from gossamer.hosts import consensus
from gossamer.hosts.intake import Intake
from gossamer.recipe import Recipe
from gossamer.worker import Worker, checkpoint, rest, until_descend
from gossamer.worker.quorum import LANE

attached: "WeakSet[nn.Module]" = WeakSet()


class Communicator:
    """What `gossamer.attach` returns: the run's controls, its bytes, and its state.

    The training loop does not change. Gradients are averaged when `backward()` returns; parameters are averaged, mixed or
    pulled when `optimizer.step()` returns, as the recipe says.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        worker: Worker,
        fabric: TorchFabric,
        *,
        buffers: str,
        find_unused_parameters: bool,
        scaler: Any,
        before_step: Callable[[], None] | None,
        measure_every: int,
    ) -> None:
        self.model, self.optimizer, self.worker, self.fabric = model, optimizer, worker, fabric
        self.buffers, self.find_unused, self.scaler = buffers, find_unused_parameters, scaler
        self.before_step, self.measure_every = before_step, measure_every
        self.exposed_seconds = 0.0  # time the training loop stood still for the network
        self._steps: Program[None] | None = None
        self._syncing, self._in_backward, self._inside, self._owes_step = True, False, False, False
        self._micro = 0
        self._task: int | None = None  # autograd's number of the backward pass under way
        self._rates: list[float] = []
        self._handles: list[Any] = []
        self._unused: list[str] = []
        self._intake: Intake | None = None

    # -- the user's side ---------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe:
        """The recipe in force; a controller may have changed it since `attach`."""
        return self.worker.recipe

    @property
    def step(self) -> int:
        """Optimizer steps completed. With backup workers it may jump: loop `while comm.step < total`."""
        return self.worker.step - 1

    @property
    def ledger(self) -> Ledger:
        return self.fabric.ledger

    @property
    def dropped(self) -> list[int]:
        """Steps whose gradient came too late on this rank and was not used."""
        return list(self.worker.stand.dropped) if self.worker.stand else []

    @property
    def accumulate(self) -> int:
        """How many micro-batches make one step at the moment."""
        return self.recipe.schedule.accumulate

    @contextlib.contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Backward passes in here only accumulate; the first one outside sends the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def accumulating(self) -> Generator[bool, None, None]:
        """Wraps one micro-batch; gives True for the last of `accumulate`, the one to step after.

        Divide the loss by `comm.accumulate`.
        """
        last = self._micro + 1 >= self.accumulate
        with contextlib.nullcontext() if last else self.no_sync():
            yield last
        self._micro = 0 if last else self._micro + 1

    def skip(self) -> None:
        """Say that this step's `optimizer.step()` is left out, where schedules count steps (a `scaler` does it alone)."""
        if not self._averages_gradients:
            self._finish(self._begin(), descended=False)

    @contextlib.contextmanager
    def consensus(self) -> Generator[None, None, None]:
        """Swap in the model that all ranks agree on, for evaluation or saving; all ranks enter it together.

        Synchronous recipes hold it already; local, overlapping and gossiping ones hold it only on average.
        """
        if self.fabric.size == 1:
            yield
            return
        self._settle_local()
        own = consensus.remember(self.model)
        self.fabric.run(consensus.swap_in(self.model, self.worker, average_buffers=self.buffers != "local"))
        try:
            yield
        finally:
            consensus.restore(self.model, own)

    def check_sync(self) -> None:
        """Compare a hash of every parameter that should be equal on all ranks; an error names those that are not."""
        if self.fabric.size > 1:
            self._settle_local()
            self.fabric.run(consensus.check(self.worker))

    def metrics(self) -> dict[str, float]:
        """Bytes, ratio to dense, waiting, compression error and residual, since `attach`."""
        ledger, worker = self.ledger, self.worker
        dense = sum(c.layout.numel * c.layout.dtype.itemsize for c in worker.channels)
        ring = 2 * (self.fabric.size - 1) * dense // max(self.fabric.size, 1) * self.step
        out = {
            "step": float(self.step),
            "sent_bytes": float(ledger.sent),
            "received_bytes": float(ledger.received),
            "ratio_to_dense": ring / ledger.sent if ledger.sent else 1.0,
            "exposed_seconds": self.exposed_seconds,
            "residual_norm": worker.residual_norm(),
            "dropped_steps": float(len(self.dropped)),
        }
        if worker.errors:
            out["relative_error"] = sum(worker.errors.values()) / len(worker.errors)
        return out

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and scalars; save one per rank, between steps. Rank-local entries carry the rank in their key."""
        self._settle_skipped()
        self.fabric.run(self.worker.quiesce())
        return checkpoint.save(self.worker)

    def load_state_dict(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take up where `state_dict` left off; after a change of world size, give the dictionaries of all old ranks.

        Attach first, then load the model, the optimizer and this: attaching makes all models equal to rank 0's.
        """
        if self.worker.stand is not None and self.worker.stand.tickets:
            raise CheckpointError(
                f"under {self.recipe} a checkpoint is loaded before the first step: the other ranks' lanes wait for the step "
                "that is under way; detach, attach again, and load then"
            )
        checkpoint.load(self.worker, saved)
        self._steps, self._owes_step, self._micro = None, False, 0
        self._rebuild()

    def detach(self) -> None:
        """Remove all hooks and end the comm lanes; the model trains on alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        attached.discard(self.model)
        self.fabric.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Put the hooks in place; in a world of one there is nothing to do but count steps."""
        attached.add(self.model)
        add = self._handles.append
        add(self.optimizer.register_step_pre_hook(self._before_step))
        add(self.optimizer.register_step_post_hook(self._after_step))
        if self.fabric.size == 1:
            return
        if self.worker.stand is not None:
            self.fabric.open_lane(LANE)
            self.worker.stand.apply = self._catch_up
        self._rebuild()
        for name, p in self.worker.named.items():
            add(p.register_post_accumulate_grad_hook(self._gradient_hook(name)))
        if self.worker.stand is not None or (not self._averages_gradients and self.scaler is not None):
            called: Any = torch.compiler.disable(
                self._before_forward
            )  # by a compiled model too, which must not trace it
            add(self.model.register_forward_pre_hook(called))

    @property
    def _averages_gradients(self) -> bool:
        return self.recipe.schedule.averages_gradients

    def _rebuild(self) -> None:
        """Channels are new (at attach, after a controller's change, after loading): so is the intake."""
        if self.fabric.size == 1:
            return
        self._intake = Intake(self.worker, self._launch) if self._averages_gradients else None

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if not self._syncing:
                return
            self._enter_backward()
            if self._intake is not None and parameter.grad is not None:
                self._intake.take(name, parameter.grad)

        return hook

    def _enter_backward(self) -> None:
        """A gradient is there: is it the first of a new backward pass?"""
        task = torch._C._current_graph_task_id()
        if self._in_backward and (task == self._task or _is_nested()):
            return
        if _is_nested():
            raise AttachError(
                "a backward pass inside of another one (reentrant checkpointing) would send its gradients before the outer "
                "pass is done: use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        if self._in_backward and self._intake is not None and self._intake.next:
            raise AttachError(
                "the last backward() ended with an exception when some of its gradients were on their way, so the ranks are "
                "no longer in step: on all ranks, detach, load a checkpoint and attach again"
            )
        self._task = task
        self._begin_backward()

    def _begin_backward(self) -> None:
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)  # pyright: ignore
        self._settle_skipped()
        if self.scaler is not None and self._averages_gradients:  # differences of parameters know no scale
            self.worker.scale = float(self.scaler.get_scale())
        self.worker.measuring = self.measure_every > 0 and self.worker.step % self.measure_every == 0
        if self._intake is not None:
            self._intake.reset()

    def _end_backward(self) -> None:
        self._in_backward = False
        if self._intake is None:
            self._owes_step = True
            return
        self._unused = self._intake.finish()
        self._steps = self._begin()
        if self.worker.stand is not None and not self.worker.finite:
            self._forget([*self.worker.named])  # as late ranks do, who never apply such an update
            return
        for channel, mean in zip(self.worker.channels, self.worker.means, strict=True):
            channel.put_gradient(mean)
        if self.find_unused:
            self._forget_unused()

    def _launch(self, index: int, flat: Tensor) -> None:
        if self.worker.stand is not None:
            self.fabric.run(self.worker.stand.offer(flat))
            return
        request = self.worker.program(index, flat, reuse=True)
        self.worker.expect(index, self.fabric.start(request.program, request.label, request.step))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        if self.fabric.size > 1 and _has_closure(args, kwargs):
            raise AttachError(
                "optimizer.step(closure) computes gradients inside the step, after they should have been averaged; "
                "call backward() yourself, then optimizer.step()"
            )
        if self.fabric.size > 1:
            if self._averages_gradients and self._steps is None:
                raise AttachError(
                    "optimizer.step() without averaged gradients: no backward() has run since the last step, or it ran "
                    "under comm.no_sync(); run the last micro-batch's backward outside of it"
                )
            if self._steps is None:
                self._steps = self._begin()
        factor = self.recipe.schedule.lr_factor
        self._rates = [g["lr"] for g in optimizer.param_groups] if factor != 1 else []
        for group in optimizer.param_groups if factor != 1 else ():
            group["lr"] = group["lr"] * factor
        if self.before_step is not None:
            self.before_step()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside:
            return
        self._owes_step = False
        if self.fabric.size > 1:
            assert self._steps is not None
            self._finish(self._steps, descended=True)
        else:
            self.worker.step += 1
        for group, rate in zip(optimizer.param_groups, self._rates):
            group["lr"] = rate

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        stand = self.worker.stand
        if not module.training:
            return
        if stand is None:
            self._settle_skipped()
        elif self.worker.step not in stand.tickets:  # from now on the lane answers, however late the gradient is
            self.fabric.run(stand.open())

    def _settle_skipped(self) -> None:
        """The last step's descent never came: a scaler left it out, or the user. The schedule counts it all the same, or
        the ranks would drift apart.
        """
        if self._steps is not None:
            self._finish(self._steps, descended=False)
        elif self._owes_step and self.scaler is not None:
            self._finish(self._begin(), descended=False)

    def _settle_local(self) -> None:
        """Before all ranks do something together: one that skipped a local step may owe a round that others wait for."""
        if not self._averages_gradients:
            self._settle_skipped()

    def _begin(self) -> Program[None]:
        steps = self.recipe.schedule.step(self.worker)
        self._wait_for(until_descend(steps))
        return steps

    def _finish(self, steps: Program[None], descended: bool) -> None:
        self._steps, self._owes_step = None, False
        channels = self.worker.channels
        self._wait_for(rest(steps, descended))
        agreed = self.worker.assigned or self._averages_gradients
        if agreed and self.buffers in ("average", "broadcast"):
            self._wait_for(consensus.share_buffers(self.model, self.worker, self.buffers))
        self.worker.end_step()
        if self.worker.channels is not channels:
            self._rebuild()

    def _wait_for(self, program: Program[None]) -> None:
        began = perf_counter()
        try:
            self.fabric.run(program)
        finally:
            self.exposed_seconds += perf_counter() - began

    def _catch_up(self, mean: Tensor, rates: Tensor) -> None:
        """Apply an update that this rank missed while it was late."""
        for group, rate in zip(self.optimizer.param_groups, rates.tolist(), strict=True):
            group["lr"] = rate
        self.worker.channels[0].put_gradient(mean)
        if self.before_step is not None:
            self.before_step()
        self._inside = True
        try:
            self.optimizer.step()
        finally:
            self._inside = False

    def _forget_unused(self) -> None:
        """A parameter that no rank used keeps no gradient, so that weight decay does not move it."""
        names = list(self.worker.named)
        used = torch.tensor([n not in set(self._unused) for n in names], dtype=torch.int32)
        counts = self.fabric.run(consensus.count(self.worker, used)).tolist()
        self._forget([name for name, count in zip(names, counts, strict=True) if count == 0])

    def _forget(self, names: list[str]) -> None:
        for name in names:
            self.worker.named[name].grad = None


def _is_nested() -> bool:
    """Does this backward pass run inside the backward of a function, as reentrant checkpointing does?"""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def _has_closure(args: Any, kwargs: Any) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None
