"""Steps: the recipe's schedule, run alongside the training loop from one step to the next."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.core.errors import AttachError
from gossamer.core.verbs import Program
from gossamer.fabrics.torch import TorchFabric
from gossamer.hosts import consensus
from gossamer.hosts.metrics import Meter
from gossamer.hosts.scaler import refuse_untold
from gossamer.worker import Worker, rest, until_descend
from gossamer.worker.quorum import LANE


class Steps:
    """Begins each step, and ends it when the optimizer has stepped, or when it shows that it will not.

    Recipes that average gradients begin a step at the end of backward, the others when the optimizer is about to step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        worker: Worker,
        fabric: TorchFabric,
        meter: Meter,
        *,
        buffers: str,
        scaler: Any,
        before_step: Callable[[], None] | None,
    ) -> None:
        self.model, self.optimizer, self.worker, self.fabric, self.meter = model, optimizer, worker, fabric, meter
        self.buffers, self.scaler, self.before_step = buffers, scaler, before_step
        self.on_new_channels: Callable[[], None] = _nobody_cares
        self._under_way: Program[None] | None = None  # begun, and not ended
        self._owed = False  # a backward is done whose step has neither come nor been counted as skipped
        self._catching_up = False
        self._rates: list[float] = []

    @property
    def averages_gradients(self) -> bool:
        return self.worker.recipe.schedule.averages_gradients

    @property
    def _acts_alone(self) -> bool:
        """In a world of one nothing is averaged, and what a schedule of averages does besides (a penalty, a batch that
        grows) is done all the same. Backup workers have no such schedule.
        """
        return self.averages_gradients and self.worker.stand is None

    def install(self) -> list[Any]:
        """Put the hooks in place, and return their handles; in a world of one they count steps."""
        stand, handles = self.worker.stand, list[Any]()
        if self.fabric.size > 1 and stand is not None:
            self.fabric.open_lane(LANE)
            stand.apply = self._catch_up
        if self.fabric.size > 1 and (stand is not None or (not self.averages_gradients and self.scaler is not None)):
            # called by a compiled model too, which must not trace it
            called: Any = torch.compiler.disable(self._before_forward)
            handles.append(self.model.register_forward_pre_hook(called))
        handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        handles.append(self.optimizer.register_step_post_hook(self._after_step))
        return handles

    # -- what may become of a step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Run the schedule up to the descent."""
        steps = self.worker.recipe.schedule.step(self.worker)
        self._wait_for(until_descend(steps))
        self._under_way = steps

    def owe(self) -> None:
        """Gradients are there, and the step has not begun yet."""
        self._owed = True

    def skip(self) -> None:
        """The step ends without a descent."""
        if self._under_way is None:
            self.begin()
        self._finish(descended=False)

    def settle_skipped(self) -> None:
        """The last step's descent never came: a scaler left it out, or the user. The schedule counts it all the same, or
        the ranks would drift apart.
        """
        if self._under_way is not None or (self._owed and self.scaler is not None):
            self.skip()

    def settle_local(self) -> None:
        """Before all ranks do something together: one that skipped a local step may owe a round that others wait for."""
        if not self.averages_gradients:
            self.settle_skipped()

    def forget(self) -> None:
        """A checkpoint was loaded: what was under way is of another run."""
        self._under_way, self._owed = None, False

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        stand = self.worker.stand
        if not module.training:
            return
        if stand is None:
            self.settle_skipped()
        elif self.worker.step not in stand.tickets:  # from now on the lane answers, however late the gradient is
            self.fabric.run(stand.open())

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._catching_up:
            return
        if self.fabric.size > 1:
            self._check(args, kwargs)
            if self._under_way is None:
                self.begin()
        elif self._acts_alone:
            self.begin()
        factor = self.worker.recipe.schedule.lr_factor
        self._rates = [g["lr"] for g in optimizer.param_groups] if factor != 1 else []
        for group in optimizer.param_groups if factor != 1 else ():
            group["lr"] = group["lr"] * factor
        if self.before_step is not None:
            self.before_step()

    def _check(self, args: Any, kwargs: Any) -> None:
        if _has_closure(args, kwargs):
            raise AttachError(
                "optimizer.step(closure) computes gradients inside the step, after they should have been averaged; "
                "call backward() yourself, then optimizer.step()"
            )
        if self.averages_gradients and self._under_way is None:
            raise AttachError(
                "optimizer.step() without averaged gradients: no backward() has run since the last step, or it ran "
                "under comm.no_sync(); run the last micro-batch's backward outside of it"
            )
        if self.scaler is None:
            refuse_untold(self.worker.recipe, self.optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._catching_up:
            return
        self._owed = False
        if self._under_way is not None:
            self._finish(descended=True)
        else:
            self.worker.step += 1
        for group, rate in zip(optimizer.param_groups, self._rates):
            group["lr"] = rate
        self.meter.step_ended()

    # -- the inside --------------------------------------------------------------------------------------------------

    def _finish(self, descended: bool) -> None:
        """Run the schedule from the descent to its end."""
        steps, self._under_way, self._owed = self._under_way, None, False
        assert steps is not None
        channels = self.worker.channels
        self._wait_for(rest(steps, descended))
        agreed = self.fabric.size > 1 and (self.worker.assigned or self.averages_gradients)
        if agreed and self.buffers in ("average", "broadcast"):
            self._wait_for(consensus.share_buffers(self.model, self.worker, self.buffers))
        self.worker.end_step()
        if self.worker.channels is not channels:
            self.on_new_channels()

    def _wait_for(self, program: Program[None]) -> None:
        began = perf_counter()
        try:
            self.fabric.run(program)
        finally:
            if self.fabric.size > 1:  # else there is nobody to wait for
                self.meter.exposed_seconds += perf_counter() - began

    def _catch_up(self, mean: Tensor, rates: Tensor) -> None:
        """Apply an update that this rank missed while it was late."""
        for group, rate in zip(self.optimizer.param_groups, rates.tolist(), strict=True):
            group["lr"] = rate
        self.worker.channels[0].put_gradient(mean)
        if self.before_step is not None:
            self.before_step()
        self._catching_up = True
        try:
            self.optimizer.step()
        finally:
            self._catching_up = False


def _has_closure(args: Any, kwargs: Any) -> bool:
    return (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None


def _nobody_cares() -> None:
    pass
