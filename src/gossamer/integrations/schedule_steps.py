"""The schedule's side of training steps: each begins, ends or is dropped, also where the members change in its midst."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from gossamer.core.errors import AttachError
from gossamer.core.hashes import hash_of
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import MembersChanged, Program
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.integrations.checks.devices import refuse_devices, refuse_dtypes
from gossamer.integrations.checks.loop_warnings import LoopWarnings
from gossamer.integrations.checks.param_watch import ParamWatch
from gossamer.integrations.checks.wrappers import warn_of_unstepped
from gossamer.integrations.handshake import compare
from gossamer.integrations.joining import Plan
from gossamer.integrations.metrics import Meter
from gossamer.integrations.parting import Parting
from gossamer.integrations.regrouping import Regrouping
from gossamer.integrations.shared import SharedBuffers
from gossamer.integrations.step_state import StepEvent, StepState, after
from gossamer.runtime import Worker, params_of

T = TypeVar("T")


class ScheduleSteps:
    """Runs the schedule of each step: up to the optimizer step, and from there to its end."""

    def __init__(self, model: nn.Module, plan: Plan, worker: Worker, fabric: TorchFabric, meter: Meter) -> None:
        self.model, self.optimizers, self.worker = model, plan.optimizers, worker
        self.fabric, self.meter = fabric, meter
        self.shared = SharedBuffers(model, worker, plan.facts["buffers"])
        self.before_step: Callable[[], None] | None = None  # called before each optimizer step, and each missed update
        self.on_new_buckets: Callable[[], None] = do_nothing
        self.doubts = LoopWarnings(worker)
        self._param_watch = ParamWatch(model, {name: param.parameter for name, param in worker.params.items()})
        self.state = StepState.IDLE
        self.regrouping: Regrouping | None = None  # under members(): what happens when they change
        self.parting: Parting | None = None  # and what this rank does if it is told to leave
        self.retries = 0  # steps that were dropped, and whose numbers are those of the next ones
        self.stage = 0  # of this step: 1 when its optimizers have stepped, 2 when its schedule has ended
        self._under_way: Program[None] | None = None  # the schedule's program for the current step
        self._done = dict[Optimizer, bool]()  # optimizers that are done with this step, and whether each stepped

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
        self.on_new_buckets()  # a comm thread that is lost may still write to the buckets of this step
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
        self.on_new_buckets()
        return True

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
            self.on_new_buckets()
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


def do_nothing() -> None:
    pass
