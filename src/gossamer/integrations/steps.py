"""Step loop: runs the recipe's schedule alongside the training loop."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks.introspection import is_within_its_step
from gossamer.integrations.checks.requirements import ADDED, refuse
from gossamer.integrations.checks.wrappers import held_by, refuse_capture, refuse_strangers
from gossamer.integrations.closures import Call, closure_of, refuse_closure, served
from gossamer.integrations.grad_scaler import ScalerHook, refuse_scaled, refuse_untold, unscale_others
from gossamer.integrations.joining import Plan
from gossamer.integrations.metrics import Meter
from gossamer.integrations.schedule_steps import ScheduleSteps, do_nothing
from gossamer.integrations.step_state import StepEvent, StepState
from gossamer.runtime import Worker


class StepLoop(ScheduleSteps):
    """Begins each step, and ends it when all optimizers have stepped or the step turns out to be skipped.

    Recipes that average gradients begin a step at the end of backward, the others when an optimizer is about to step.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, worker: Worker, fabric: TorchFabric, meter: Meter, scaler: Any
    ) -> None:
        super().__init__(model, plan, worker, fabric, meter)
        self.scaler = scaler
        self.average_late: Callable[[], None] = do_nothing  # averages gradients that backward has not seen
        self.refuse_to_add: Callable[[], None] = do_nothing  # called where a backward pass adds to averaged gradients
        self._turns = Counter[Optimizer]()  # number of steps of each optimizer
        self._held = held_by(self.optimizers)

    def install(self) -> list[Any]:
        """Register the hooks and return their handles; with one rank they only count steps."""
        lane, handles = self.worker.recipe.schedule.shape.lane, list[Any]()
        if self.fabric.size > 1 and lane:
            self.fabric.open_lane(lane, served=self.worker.recipe.schedule.shape.serves)
            self.fabric.before_close = self._leave
            handles.append(self.model.register_forward_pre_hook(ForwardHook(self._begin_forward)))
        if self.fabric.size > 1 and self.scaler is not None:
            handles.append(ScalerHook(self.scaler, self._turns, self._left_out))
        for optimizer in self.optimizers:  # a compiled step must not trace the hooks
            before: Any = torch.compiler.disable(self._before_step)
            after: Any = torch.compiler.disable(self._after_step)
            handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        return [*handles, self.worker.update_step]

    def _leave(self) -> None:
        self.fabric.run(self.worker.leave(), "detach", self.worker.step - 1)

    # -- skipping a step ----------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """End the step without (another) optimizer step; without any, memories are as if its gradients had not been averaged."""
        if self.state is StepState.DROPPED:
            self.settle_skipped()  # its retry is what is skipped: no backward() has come before it
        if self._has_begun():
            self._finish(descended=any(self._done.values()))

    def _has_begun(self) -> bool:
        """True if the step is under way; a step that averages no gradients begins here, unless the members change."""
        if self._under_way is None and not self.averages_gradients:
            self.begin()
        return self._under_way is not None

    def settle_skipped(self, arriving: Tensor | None = None) -> None:
        """End the last step if no optimizer step came for it. The schedule counts it, so that ranks stay at equal steps.

        `arriving` is the parameter whose new gradient shows it, during a backward pass; buffers must not be written then,
        since autograd has saved them.
        """
        if self.state is StepState.DROPPED:
            self._note(StepEvent.END)
        if self._under_way is None:
            return
        inside, averages = arriving is not None, self.averages_gradients
        if inside and not averages:
            return  # at the end of the pass: a round may end, and write to parameters that the pass still needs
        if self._done:
            self.doubts.some_optimizers_rest(len(self._done), len(self.optimizers))
            self._finish(descended=any(self._done.values()), share=not inside)
            return
        thrown_away = self.gradients_are_gone(arriving)
        if inside and self.worker.averaging.finite:
            self.doubts.never_stepped(thrown_away)
            if not thrown_away:
                refuse(self.worker.recipe, ADDED)
                self.refuse_to_add()
        self._finish(descended=False, share=not inside, kept=averages and not thrown_away)

    def only_adds(self, arriving: Tensor) -> None:
        """Note a gradient that arrives under `no_sync()` after averaging: the averages were thrown away, or are now mixed."""
        if self._under_way is None or self.state is StepState.MIXED or not self.averages_gradients:
            return
        if self.gradients_are_gone(arriving):
            self.settle_skipped(arriving)
        else:
            self._note(StepEvent.ADD)

    def settle_local(self) -> None:
        """End a skipped step before all ranks do something together, since other ranks may wait for its round."""
        if not self.averages_gradients or self.worker.recipe.schedule.shape.mixer is not None:
            self.settle_skipped()

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """Begin a training step: from now on the comm thread answers other ranks, however late this rank's gradient is."""
        self.fabric.run(self.worker.begin(), "forward", self.worker.step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Call | None:
        """Run before each `optimizer.step()`; return other arguments for the call, or None."""
        if self.state is StepState.CATCHING_UP or is_within_its_step(optimizer):
            return None
        if optimizer in self._done:  # the other optimizers have not stepped
            self.settle_skipped()
        call = self._serve(optimizer, args, kwargs)
        if self.state is StepState.DROPPED:
            return call
        refuse_scaled(self.worker.recipe, optimizer)
        if not self._done:
            self._first_is_about_to_step(optimizer)
        self.worker.update_step.enter(optimizer)
        return call

    def _first_is_about_to_step(self, optimizer: Optimizer) -> None:
        if self.fabric.size > 1:
            self._check(optimizer)
        # On one rank nothing is averaged, but the schedule may do more than average, such as a penalty or a growing batch.
        acts = self.fabric.size > 1 or self.worker.recipe.schedule.shape.works_alone
        if acts and self._under_way is None:  # else the last call raised an error before the step was over
            self.begin()
        if self.before_step is not None:
            self.before_step()
        if self.scaler is not None and self.worker.recipe.update is not None:
            unscale_others(self.scaler, self.optimizers, optimizer)
        self.worker.redirect()

    def _serve(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Call | None:
        """Call the optimizer's closure now, if it has one, so that its gradients are averaged before the step."""
        closure, alone = closure_of(args, kwargs), self.fabric.size == 1
        if closure is None:
            return None
        if not alone:
            refuse_closure(another_has_stepped=bool(self._done), scaler=self.scaler)
        return served(optimizer, closure, (args, kwargs), alone)

    def _check(self, optimizer: Optimizer) -> None:
        refuse_capture(self.worker.device)
        if (held := held_by(self.optimizers)) != self._held:  # parameters were added since attach
            refuse_strangers(self.model, self.optimizers)
            self._held = held
        if self.averages_gradients and self._under_way is None and self.follow():
            self.average_late()  # all parameters with hooks are frozen now, so no backward was seen
        if self.averages_gradients and self._under_way is None:
            raise AttachError(
                "optimizer.step() without averaged gradients: no backward() has run since the last step, or it ran "
                "under comm.no_sync(); run the backward() of the last micro-batch outside of no_sync()"
            )
        if self.state is StepState.MIXED:
            raise AttachError(
                "a backward() under comm.no_sync() ran after the gradients were averaged, and added gradients of this rank only: "
                "run all but the last backward() under no_sync(), and the last one outside of it"
            )
        if self.scaler is None:
            refuse_untold(self.worker.recipe, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.state in (StepState.CATCHING_UP, StepState.DROPPED) or is_within_its_step(optimizer):
            return
        self._turns[optimizer] += 1
        self._end_turn(optimizer, stepped=True)

    def _left_out(self, optimizer: Optimizer) -> None:
        """End this optimizer's turn after the scaler has skipped its step."""
        if optimizer in self.optimizers and optimizer not in self._done and self._has_begun():
            self._end_turn(optimizer, stepped=False)

    # -- internals ---------------------------------------------------------------------------------------------------

    def _end_turn(self, optimizer: Optimizer, stepped: bool) -> None:
        self._done[optimizer] = stepped
        self._note(StepEvent.TURN)
        self.worker.update_step.leave(optimizer)
        if len(self._done) < len(self.optimizers):
            return
        if self._under_way is None:
            self._done = {}
            self._note(StepEvent.END)
            self.worker.step += 1
        else:
            self._finish(descended=any(self._done.values()))
        if stepped:
            self.meter.step_ended()
        if self.fabric.members is not None and self.fabric.size > 1:
            self.fabric.members.step_ended()
        if self.parting is not None:
            self.parting.after_step()
            if self.parting.has_left:
                return
        if self.regrouping is not None:
            self.regrouping.between_steps()
            self.take_part()

    def gradients_are_gone(self, arriving: Tensor | None) -> bool:
        """True if the user has cleared the averaged gradients: all but the one that arrives are None or zero."""
        params = self.worker.params.values()
        others = [param.gradient for param in params if param.parameter is not arriving]
        if others or arriving is None:
            return self.worker.replica.all(not any(g is not None and bool(g.any()) for g in others))
        agreed = {mean.untyped_storage().data_ptr() for mean in self.worker.averaging.means}
        (only,) = [param.gradient for param in params]  # a model of one parameter
        return self.worker.replica.all(only is None or only.untyped_storage().data_ptr() not in agreed)


class ForwardHook:
    """Opens the quorum of a step (backup workers) before each training forward; in copies of the model it does nothing."""

    def __init__(self, open_quorum: Callable[[], None] | None = None) -> None:
        self._open: Any = open_quorum and torch.compiler.disable(open_quorum)  # called by a compiled model too

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._open is not None and module.training:
            self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, ()
