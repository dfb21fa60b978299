"""Step loop: runs the recipe's schedule alongside the training loop."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.core.hashes import hash_of
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import MembersChanged, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks.devices import refuse_devices, refuse_dtypes
from gossamer.integrations.checks.introspection import is_within_its_step
from gossamer.integrations.checks.loop_warnings import LoopWarnings
from gossamer.integrations.checks.param_watch import ParamWatch
from gossamer.integrations.checks.wrappers import held_by, refuse_capture, refuse_strangers, warn_of_unstepped
from gossamer.integrations.closures import Call, closure_of, refuse_closure, served
from gossamer.integrations.grad_scaler import ScalerHook, refuse_scaled, refuse_untold, unscale_others
from gossamer.integrations.handshake import compare
from gossamer.integrations.joining import Plan
from gossamer.integrations.metrics import Meter
from gossamer.integrations.parting import Parting
from gossamer.integrations.regrouping import Regrouping
from gossamer.integrations.shared import SharedBuffers
from gossamer.integrations.step_state import StepEvent, StepState, after
from gossamer.runtime import Worker, params_of

T = TypeVar("T")


class StepLoop:
    """Begins each step, and ends it when all optimizers have stepped or the step turns out to be skipped.

    Recipes that average gradients begin a step at the end of backward, the others when an optimizer is about to step.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, worker: Worker, fabric: TorchFabric, meter: Meter, scaler: Any
    ) -> None:
        self.model, self.optimizers, self.worker = model, plan.optimizers, worker
        self.fabric, self.meter, self.scaler = fabric, meter, scaler
        self.shared = SharedBuffers(model, worker, plan.facts["buffers"])
        self.before_step: Callable[[], None] | None = None  # called before each optimizer step, and each missed update
        self.on_new_channels: Callable[[], None] = _do_nothing
        self.average_late: Callable[[], None] = _do_nothing  # averages gradients that backward has not seen
        self.refuse_to_add: Callable[[], None] = _do_nothing  # called where a backward pass adds to averaged gradients
        self.doubts = LoopWarnings(worker)
        self._param_watch = ParamWatch(model, {name: param.parameter for name, param in worker.params.items()})
        self.state = StepState.IDLE
        self.regrouping: Regrouping | None = None  # under members(): what happens when they change
        self.parting: Parting | None = None  # and what this rank does if it is told to leave
        self.retries = 0  # steps that were dropped, and whose numbers are those of the next ones
        self.stage = 0  # of this step: 1 when its optimizers have stepped, 2 when its schedule has ended
        self._under_way: Program[None] | None = None  # the schedule's program for the current step
        self._done = dict[Optimizer, bool]()  # optimizers that are done with this step, and whether each stepped
        self._turns = Counter[Optimizer]()  # number of steps of each optimizer
        self._held = held_by(self.optimizers)

    def _note(self, event: StepEvent) -> None:
        self.state = after(self.state, event)

    @property
    def members_just_came(self) -> bool:
        """True if ranks have come since the last step: they are about to take the next one, and not where this rank is between steps."""
        return self.regrouping is not None and self.regrouping.came_before == self.worker.step

    @property
    def averages_gradients(self) -> bool:
        """True if the current step averages gradients."""
        return self.worker.recipe.schedule.averages(self.worker.step)

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

    # -- beginning, skipping and ending a step -----------------------------------------------------------------------

    def begin(self) -> bool:
        """Run the schedule up to the optimizer step; False if the members have changed, and the step is dropped."""
        if self.parting is not None:
            self.parting.refuse_after_leaving()
        if not self.averages_gradients:  # else backward has done this
            self.follow()
            self.ask_for_buffers()
        steps = self.worker.steps()
        try:
            while missed := self._wait_for(until_optimizer_step(steps)):
                self.worker.update_step.make_up(missed, self._step_for_it, self.before_step)
        except MembersChanged:
            self._drop()
            return False
        self._under_way = steps
        self._note(StepEvent.BEGIN)
        return True

    def _drop(self) -> None:
        """Drop this step: no parameter has a gradient, so that optimizers leave all as it is."""
        self.worker.drop()
        self.retries += 1
        self.shared.let_go()
        self.on_new_channels()  # a comm thread that is lost may still write to the buckets of this step
        self.worker.update_step.put()
        self._note(StepEvent.DROP)
        self.take_part()

    def take_part(self) -> None:
        """Take part in the rest of a step that the others are in the midst of, and whose beginning this rank has taken over."""
        averaging, regrouping = self.worker.averaging, self.regrouping
        while regrouping is not None and regrouping.rest:
            self.stage, regrouping.rest = regrouping.rest, 0
            taken = averaging.taken
            try:
                self._go_through(self.stage)
            except MembersChanged:
                if averaging.taken == taken:
                    raise
                self._forget_the_rest()  # it was lost once more, and has the state of others again
                continue
            self.worker.end_step(True)
            self.stage = 0

    def _go_through(self, stage: int) -> None:
        """The rest of a step, from where its optimizers have stepped, or from where its schedule has ended."""
        if stage == 1:
            steps = self.worker.steps()
            self._wait_for(until_optimizer_step(steps))
            self._wait_for(after_optimizer_step(steps, True))
        elif self.worker.averaging.resumes:
            self.worker.assigned = True  # the others share buffers, since they have assigned the model
        self._share_buffers()

    def ask_for_buffers(self) -> None:
        """Start to ask which buffers changed, before anything else is sent, so that the step's end need not wait for it."""
        if self.fabric.size > 1:
            self.fabric.run(self.shared.ask())

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
        thrown_away = self._gradients_are_gone(arriving)
        if inside and self.worker.averaging.finite:
            self.doubts.never_stepped(thrown_away)
            if not thrown_away:
                self.refuse_to_add()
        self._finish(descended=False, share=not inside, kept=averages and not thrown_away)

    def only_adds(self, arriving: Tensor) -> None:
        """Note a gradient that arrives under `no_sync()` after averaging: the averages were thrown away, or are now mixed."""
        if self._under_way is None or self.state is StepState.MIXED or not self.averages_gradients:
            return
        if self._gradients_are_gone(arriving):
            self.settle_skipped(arriving)
        else:
            self._note(StepEvent.ADD)

    def settle_local(self) -> None:
        """End a skipped step before all ranks do something together, since other ranks may wait for its round."""
        if not self.averages_gradients or self.worker.recipe.schedule.shape.mixer is not None:
            self.settle_skipped()

    def forget(self) -> None:
        """Forget the current step, after a checkpoint was loaded."""
        self._under_way, self._done = None, {}
        self._note(StepEvent.FORGET)
        self.worker.discard()
        self.shared.forget()

    def follow(self) -> bool:
        """Add unfrozen parameters to the run; False if there are none. Other changes to the model raise an error."""
        if self.worker.device != self.fabric.device and self.fabric.size > 1:
            raise AttachError(
                f"the model was moved from {self.fabric.device} to {self.worker.device} after attach: detach(), and attach where it trains"
            )
        new = self._param_watch.unfrozen()
        if not new:
            return False
        refuse_dtypes(new)
        refuse_devices({name: param.parameter for name, param in self.worker.params.items()} | new, {})
        warn_of_unstepped(new, self.optimizers)
        first = next(iter(new))
        if self.worker.recipe.schedule.shape.lane or self.worker.is_sending():
            raise AttachError(
                f"parameter {first!r} was unfrozen, and under {self.worker.recipe} a parameter cannot be added during a run: "
                "detach() and attach again"
            )
        facts = {f"parameter {n}, unfrozen just now": f"{tuple(p.shape)}, hash {hash_of(p)}" for n, p in new.items()}
        self.fabric.run(compare(self.worker, facts), "unfreezing parameters", self.worker.step)
        self.meter.grows()
        self.worker.follow(params_of(new))
        self.on_new_channels()
        return True

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
        over = len(self._done) == len(self.optimizers)
        if over and self._under_way is None:
            self._done = {}
            self._note(StepEvent.END)
            self.worker.step += 1
        elif over:
            self._finish(descended=any(self._done.values()))
        if over and stepped:
            self.meter.step_ended()
        if over and self.fabric.members is not None and self.fabric.size > 1:
            self.fabric.members.step_ended()
        if over and self.parting is not None:
            self.parting.after_step()
            if self.parting.has_left:
                return
        if over and self.regrouping is not None:
            self.regrouping.between_steps()
            self.take_part()

    def _gradients_are_gone(self, arriving: Tensor | None) -> bool:
        """True if the user has cleared the averaged gradients: all but the one that arrives are None or zero."""
        params = self.worker.params.values()
        others = [param.gradient for param in params if param.parameter is not arriving]
        if others or arriving is None:
            return self.worker.replica.all(not any(g is not None and bool(g.any()) for g in others))
        agreed = {mean.untyped_storage().data_ptr() for mean in self.worker.averaging.means}
        (only,) = [param.gradient for param in params]  # a model of one parameter
        return self.worker.replica.all(only is None or only.untyped_storage().data_ptr() not in agreed)

    def _finish(self, descended: bool, share: bool = True, kept: bool = False) -> None:
        """Run the schedule from the optimizer step to its end.

        Memories and controllers are updated only here: if the optimizer stepped, or if gradients are `kept` for a later step.
        """
        if not (descended or kept):
            self.worker.discard()
        steps, self._under_way, self._done = self._under_way, None, {}
        self._note(StepEvent.END)
        assert steps is not None
        buckets, averaged = self.worker.buckets, self.worker.recipe.schedule.shape.averages_gradients
        self.stage, taken = 1, self.worker.averaging.taken
        weights = [] if share else [param.parameter for param in self.worker.params.values()]
        versions = [p._version for p in weights]
        try:
            self._wait_for(after_optimizer_step(steps, descended))
            self.stage = 2
            if share and self.fabric.size > 1:
                self._share_buffers()
        except MembersChanged:
            if self.worker.recipe.schedule.shape.outlasts != "models":  # else they are equal now, and the step is over
                if self.worker.averaging.taken == taken:
                    raise
                self._forget_the_rest()
                self.take_part()
                return
        self.shared.let_go()
        self.worker.end_step(descended)
        self.stage = 0
        self.doubts.look_for_spoilers()
        if self.worker.buckets is not buckets or self.worker.recipe.schedule.shape.averages_gradients != averaged:
            self.on_new_channels()
        if versions != [p._version for p in weights]:
            raise AttachError(
                f"{self.worker.origin} wrote to parameters when this backward() showed that the last step was over, and a backward pass "
                "needs them as they were: where not all optimizers step, or none, call comm.skip() on all ranks before the next forward"
            )

    def _forget_the_rest(self) -> None:
        """Forget the rest of a step: this rank has another's state, for it stood still, or was behind and could not be led on."""
        self.stage, self.worker.assigned = 0, False
        self.worker.discard()
        self.shared.let_go()

    def _share_buffers(self) -> None:
        """Share buffers where models are equal now; again, if the members change meanwhile."""
        averaging = self.worker.averaging
        taken = averaging.taken
        while self.worker.assigned or self.worker.recipe.schedule.is_synced(self.worker.step):
            try:
                self._wait_for(self.worker.jointly(self.shared.agree()))
            except MembersChanged:
                if self.worker.recipe.schedule.shape.outlasts == "models" or averaging.taken != taken:
                    raise
            else:
                return

    def _wait_for(self, program: Program[T]) -> T:
        alone = self.fabric.size == 1  # no other rank to wait for
        with nullcontext() if alone else self.fabric.standstill.counted():
            return self.fabric.run(program, "training step", self.worker.step)

    def _step_for_it(self) -> None:
        """Apply a missed update with the optimizers; hooks do not count it as a step."""
        self._note(StepEvent.MISS)
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            self._note(StepEvent.CATCH_UP)


class ForwardHook:
    """Opens the quorum of a step (backup workers) before each training forward; in copies of the model it does nothing."""

    def __init__(self, open_quorum: Callable[[], None] | None = None) -> None:
        self._open: Any = open_quorum and torch.compiler.disable(open_quorum)  # called by a compiled model too

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._open is not None and module.training:
            self._open()

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardHook, ()


def _do_nothing() -> None:
    pass
