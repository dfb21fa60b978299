"""Steps: the recipe's schedule, run alongside the training loop from one step to the next."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.core.hashes import hash_of
from gossamer.core.verbs import Program
from gossamer.fabrics.torch import TorchFabric
from gossamer.integrations.closures import Call, closure_of, refuse_closure, served
from gossamer.integrations.forward_hook import ForwardHook
from gossamer.integrations.grad_scaler import ScalerHook, refuse_untold
from gossamer.integrations.handshake import compare
from gossamer.integrations.loop_warnings import LoopWarnings
from gossamer.integrations.metrics import Meter
from gossamer.integrations.param_watch import ParamWatch
from gossamer.integrations.shared import SharedBuffers
from gossamer.integrations.wrappers import refuse_capture
from gossamer.runtime import Worker, after_optimizer_step, params_of, until_optimizer_step

T = TypeVar("T")


class StepLoop:
    """Begins each step, and ends it when all optimizers have stepped, or when it shows that they will not.

    Recipes that average gradients begin a step at the end of backward, the others when an optimizer is about to step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        worker: Worker,
        fabric: TorchFabric,
        meter: Meter,
        *,
        buffers: str,
        scaler: Any,
        before_step: Callable[[], None] | None,
    ) -> None:
        self.model, self.optimizers, self.worker, self.fabric, self.meter = model, optimizers, worker, fabric, meter
        self.shared, self.scaler, self.before_step = SharedBuffers(model, worker, buffers), scaler, before_step
        self.on_new_channels: Callable[[], None] = _nobody_cares
        self.average_late: Callable[[], None] = _nobody_cares  # what backward should have started, and did not see
        self.doubts = LoopWarnings(worker)
        self._roster = ParamWatch(model, {name: param.parameter for name, param in worker.params.items()})
        self._under_way: Program[None] | None = None  # begun, and not ended
        self._done = dict[Optimizer, bool]()  # whose turn in this step is over, and whether it stepped
        self._mixed = False  # did gradients of this rank alone join those that were averaged?
        self._turns = Counter[Optimizer]()  # how often each has stepped
        self._catching_up = False

    @property
    def averages_gradients(self) -> bool:
        """At the step that is computed."""
        return self.worker.recipe.schedule.averages(self.worker.step)

    def install(self) -> list[Any]:
        """Put the hooks in place, and return their handles; in a world of one they count steps."""
        lane, handles = self.worker.recipe.schedule.lane, list[Any]()
        if self.fabric.size > 1 and lane:
            self.fabric.open_lane(lane, served=self.worker.recipe.schedule.serves)
            self.fabric.before_close = self._leave
            handles.append(self.model.register_forward_pre_hook(ForwardHook(self._begin_forward)))
        if self.fabric.size > 1 and self.scaler is not None:
            handles.append(ScalerHook(self.scaler, self._turns, self._left_out))
        for optimizer in self.optimizers:  # a compiled step must not trace the hooks
            before: Any = torch.compiler.disable(self._before_step)
            after: Any = torch.compiler.disable(self._after_step)
            handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        return handles

    def _leave(self) -> None:
        self.fabric.run(self.worker.leave(), "detach", self.worker.step - 1)

    # -- what may become of a step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Run the schedule up to the descent."""
        if not self.averages_gradients:  # else backward has done so
            self.follow()
            self.ask_for_buffers()
        steps = self.worker.steps()
        while missed := self._wait_for(until_optimizer_step(steps)):
            self.worker.descent.make_up(missed, self._step_for_it, self.before_step)
        self._under_way = steps

    def ask_for_buffers(self) -> None:
        """Before anything else is sent at this step: where nothing has changed, the step then waits for nobody at its end."""
        if self.fabric.size > 1:
            self.fabric.run(self.shared.ask())

    def skip(self) -> None:
        """The step ends without a descent, and its gradients leave no trace in memories."""
        if self._under_way is None:
            if self.averages_gradients:
                return
            self.begin()
        self._finish(descended=False)

    def settle_skipped(self, arriving: Tensor | None = None) -> None:
        """The last step's descent never came. The schedule counts it all the same, or the ranks would drift apart.

        `arriving` is the parameter whose new gradient shows it, in the midst of a backward pass, which saved buffers that
        nobody may write to now.
        """
        if self._under_way is None:
            return
        inside = arriving is not None
        if self._done:
            self.doubts.some_optimizers_rest(len(self._done), len(self.optimizers))
            self._finish(descended=True, share=not inside)
            return
        thrown_away = self._gradients_are_gone(arriving)
        if inside and self.worker.finite:
            self.doubts.never_stepped(thrown_away)
        self._finish(descended=False, share=not inside, kept=not thrown_away)

    def only_adds(self, arriving: Tensor) -> None:
        """A gradient arrives under `no_sync()`. What was averaged before it has been thrown away, or is averages no more."""
        if self._under_way is None or self._mixed or not self.averages_gradients:
            return
        if self._gradients_are_gone(arriving):
            self.settle_skipped(arriving)
        else:
            self._mixed = True

    def settle_local(self) -> None:
        """Before all ranks do something together: one that skipped a step may owe a round that others wait for."""
        if not self.averages_gradients or self.worker.recipe.schedule.drives is not None:
            self.settle_skipped()

    def forget(self) -> None:
        """A checkpoint was loaded: what was under way is of another run."""
        self._under_way, self._done, self._mixed = None, {}, False
        self.worker.discard()
        self.shared.forget()

    def follow(self) -> bool:
        """Take in parameters that have been unfrozen; False if there are none. Other changes to the model are errors."""
        new = self._roster.unfrozen()
        if not new:
            return False
        first = next(iter(new))
        if self.worker.recipe.schedule.lane or self.worker.is_sending():
            raise AttachError(
                f"parameter {first!r} has been unfrozen, and under {self.worker.recipe} it cannot join a run that is under "
                "way: detach() and attach again"
            )
        facts = {f"parameter {n}, unfrozen just now": f"{tuple(p.shape)}, hash {hash_of(p)}" for n, p in new.items()}
        self.fabric.run(compare(self.worker, facts), "unfreezing parameters", self.worker.step)
        self.meter.grows()
        self.worker.follow(params_of(new))
        self.on_new_channels()
        return True

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _begin_forward(self) -> None:
        """A training step begins: from now on the schedule's lane answers, however late the gradient is."""
        self.fabric.run(self.worker.begin(), "forward", self.worker.step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Call | None:
        """What is returned is what the optimizer is called with instead."""
        if self._catching_up:
            return None
        if optimizer in self._done:  # the others did not have their turn
            self.settle_skipped()
        call = self._serve(optimizer, args, kwargs)
        if not self._done:
            self._first_is_about_to_step(optimizer)
        self.worker.descent.enter(optimizer)
        return call

    def _first_is_about_to_step(self, optimizer: Optimizer) -> None:
        if self.fabric.size > 1:
            self._check(optimizer)
            if self._under_way is None:
                self.begin()
        elif self.worker.recipe.schedule.works_alone:
            # Nothing is averaged, and what a schedule does besides (a penalty, a batch that grows) is done all the same.
            self.begin()
        if self.before_step is not None:
            self.before_step()
        self.worker.redirect()

    def _serve(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Call | None:
        """Have a closure compute the gradients now."""
        closure, alone = closure_of(args, kwargs), self.fabric.size == 1
        if closure is None:
            return None
        if not alone:
            refuse_closure(another_has_stepped=bool(self._done), scaler=self.scaler)
        return served(optimizer, closure, (args, kwargs), alone)

    def _check(self, optimizer: Optimizer) -> None:
        refuse_capture(self.worker.device)
        if self.averages_gradients and self._under_way is None and self.follow():
            self.average_late()  # all that trained before is frozen: no backward was seen
        if self.averages_gradients and self._under_way is None:
            raise AttachError(
                "optimizer.step() without averaged gradients: no backward() has run since the last step, or it ran "
                "under comm.no_sync(); run the last micro-batch's backward outside of it"
            )
        if self._mixed:
            raise AttachError(
                "a backward() under comm.no_sync() came after the gradients were averaged, and added what only this rank has: "
                "run the first ones under no_sync(), and the last one outside of it"
            )
        if self.scaler is None:
            refuse_untold(self.worker.recipe, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._catching_up:
            return
        self._turns[optimizer] += 1
        self._end_turn(optimizer, stepped=True)

    def _left_out(self, optimizer: Optimizer) -> None:
        """The scaler has skipped this optimizer's step."""
        if optimizer not in self.optimizers or optimizer in self._done:
            return
        if self._under_way is None:
            if self.averages_gradients:
                return
            self.begin()
        self._end_turn(optimizer, stepped=False)

    # -- the inside --------------------------------------------------------------------------------------------------

    def _end_turn(self, optimizer: Optimizer, stepped: bool) -> None:
        self._done[optimizer] = stepped
        over = len(self._done) == len(self.optimizers)
        if over and self._under_way is None:
            self._done = {}
            self.worker.step += 1
        elif over:
            self._finish(descended=any(self._done.values()))
        self.worker.descent.leave(optimizer)
        if over and stepped:
            self.meter.step_ended()

    def _gradients_are_gone(self, arriving: Tensor | None) -> bool:
        """Has the user thrown away what was averaged? Then all gradients are None or zero, but for the one that arrives."""
        params = self.worker.params.values()
        others = [param.gradient for param in params if param.parameter is not arriving]
        if others or arriving is None:
            return not any(g is not None and bool(g.any()) for g in others)
        agreed = {mean.untyped_storage().data_ptr() for mean in self.worker.means}
        (only,) = [param.gradient for param in params]  # a model of one parameter
        return only is None or only.untyped_storage().data_ptr() not in agreed

    def _finish(self, descended: bool, share: bool = True, kept: bool = False) -> None:
        """Run the schedule from the descent to its end. Here, and nowhere before, it is settled what becomes of a step:
        memories and controllers move on if it descended, or if its gradients are `kept` for a later one.
        """
        if not (descended or kept):
            self.worker.discard()
        steps, self._under_way, self._done, self._mixed = self._under_way, None, {}, False
        assert steps is not None
        buckets, averaged = self.worker.buckets, self.worker.recipe.schedule.averages_gradients
        self._wait_for(after_optimizer_step(steps, descended))
        agreed = self.worker.assigned or self.worker.recipe.schedule.is_synced(self.worker.step)
        if agreed and share and self.fabric.size > 1:
            self._wait_for(self.shared.agree())
        self.shared.let_go()
        self.worker.end_step(descended)
        self.doubts.look_for_spoilers()
        if self.worker.buckets is not buckets or self.worker.recipe.schedule.averages_gradients != averaged:
            self.on_new_channels()

    def _wait_for(self, program: Program[T]) -> T:
        alone = self.fabric.size == 1  # there is nobody to wait for
        with nullcontext() if alone else self.fabric.standstill.counted():
            return self.fabric.run(program, "training step", self.worker.step)

    def _step_for_it(self) -> None:
        """The optimizers take an update that this rank has missed; no hook counts that as a step of its own."""
        self._catching_up = True
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        finally:
            self._catching_up = False


def _nobody_cares() -> None:
    pass
