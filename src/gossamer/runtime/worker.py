"""The worker: runs a recipe's parts on a model's buckets, through requests that any fabric can answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket
from gossamer.core.contracts import ARREARS, Context
from gossamer.core.loop import UntrainedTensors
from gossamer.core.rng import CounterRng
from gossamer.core.schedule import Elastic
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import MembersChanged, Program
from gossamer.recipe import Recipe
from gossamer.runtime import optimizers
from gossamer.runtime.averaging import Averaging
from gossamer.runtime.buckets import build
from gossamer.runtime.controller_runner import ControllerRunner
from gossamer.runtime.decay import Decay
from gossamer.runtime.in_flight import InFlightTable, PendingCommit
from gossamer.runtime.loop import WorkerLoop
from gossamer.runtime.measuring import ErrorMeasurement
from gossamer.runtime.optimizer_state import OptimizerState
from gossamer.runtime.params import Param
from gossamer.runtime.ranks import WorkerRanks
from gossamer.runtime.record import RunRecord
from gossamer.runtime.replica import ReplicaRanks, WholeReplica
from gossamer.runtime.update_step import UpdateStep

T = TypeVar("T")

SHARDS_DRAW_APART = 0x9E3779B97F4A7C15  # between the seeds of two shards of a replica


class Worker:
    """One rank's side of a training run; schedules see it through a `WorkerLoop`."""

    def __init__(
        self,
        recipe: Recipe,
        params: Mapping[str, Param],
        optimizer: optimizers.Optimizing,
        rank: int,
        size: int,
        seed: int = 0,
    ) -> None:
        self.origin = recipe  # as given by the user; a controller may put another in force
        self.recipe = recipe.bound({name: param.whole_shape for name, param in params.items()})
        self.params, self.optimizer = dict(params), optimizer
        self.replica: ReplicaRanks = WholeReplica()
        self.step = 1  # the current step
        self.scale = 1.0  # the loss scaler's factor on gradients
        self.loss: Tensor | float | None = None  # this step's loss, if the training loop reports it
        self.assigned = False  # did this step write parameters that all ranks agreed on?
        self.untrained: UntrainedTensors | None = None
        self.live = dict[str, Any]()  # what the schedule keeps between steps
        self.ranks, self.record = WorkerRanks(self, rank, size, seed), RunRecord(self)
        self.buckets = build(self.recipe, self.params, self.rate_groups(), size)
        self._refuse_misfits()
        self.optimizer_state, self.update_step = OptimizerState(self), UpdateStep(self)
        self.averaging, self.in_flight, self.measurement = Averaging(self), InFlightTable(), ErrorMeasurement()
        self.controller, self.decay = ControllerRunner(self), Decay(self)
        self.decay.refuse_unknown()
        self.loop = WorkerLoop(self)

    @property
    def rank(self) -> int:
        """This rank's number among the ranks that are present."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks that are present."""
        return self.ranks.size

    @property
    def device(self) -> torch.device:
        """The device for tensors that belong to no single parameter."""
        return next(iter(self.params.values())).device

    def context(self, index: int, step: int = 0) -> Context:
        """The context of a bucket at this step, or another one."""
        bucket, step = self.buckets[index], step or self.step
        # Shards of one replica draw unlike numbers. Who meets whom is drawn by `ranks`, alike for all of them.
        rng = CounterRng(self.ranks.seed + SHARDS_DRAW_APART * self.replica.index, step, self.rank)
        # One that is on a GPU would be waited for, at each bucket.
        follows, factor = self.recipe.follows_rate, self.recipe.schedule.shape.lr_factor
        lr = factor * bucket.rate(self.optimizer) if follows else 1.0
        return Context(self.rank, self.size, step, rng, lr=lr, shift=bucket.shift, scale=self.scale)

    def set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self) -> Program[None]:
        """Begin a step, before the forward pass."""
        yield from self.recipe.schedule.begin(self.loop)

    def ready(self, index: int, flat: Tensor) -> Program[None]:
        """Handle a bucket's gradient, which is complete and may be overwritten."""
        self.decay.enter(index, flat)
        yield from self.recipe.schedule.ready(self.loop, index, flat)

    def jointly(self, program: Program[T]) -> Program[T]:
        """Run a program; if the members change meanwhile, it is lost on all ranks that hold this replica, or on none."""
        try:
            result = yield from program
        except MembersChanged as lost:
            self.replica.outlive(lost)
            raise
        self.replica.outlive(None)
        return result

    def steps(self) -> Program[None]:
        """Run one step of the recipe's schedule, and what must be done before the next one is another's."""
        yield from self.recipe.schedule.step(self.loop)
        yield from self.controller.agree()

    def train_step(
        self,
        gradients: Sequence[Tensor],
        descend: Callable[[], bool],
        step: Callable[[], object],
        arrive: "Callable[[int], Program[None]] | None" = None,
    ) -> Program[None]:
        """Run one whole step without hooks: send gradients, run the schedule, call the optimizer when it says so.

        `step` is the optimizer's, for updates that this rank has missed. `arrive` runs until a bucket's gradient is there.
        """
        if self.recipe.schedule.averages(self.step) and self.size > 1:
            for i, flat in enumerate(gradients):
                if arrive is not None:
                    yield from arrive(i)
                yield from self.ready(i, flat)
        steps = self.steps()
        while missed := (yield from until_optimizer_step(steps)):
            self.update_step.make_up(missed, step)
        descended = descend()
        if not descended:
            self.discard()
        yield from after_optimizer_step(steps, descended)
        self.end_step(descended)

    def redirect(self) -> None:
        """Apply the recipe's update to the gradients, before the optimizer step.

        Means that are not finite stay as they are, so that a loss scaler sees them. Own gradients are not checked.
        """
        if self.averaging.finite or not self.recipe.schedule.averages(self.step):
            self.averaging.held.drafts += self.update_step.redirect()

    def discard(self) -> None:
        """Drop this step's gradients and the changes that memories and controllers made for them."""
        self.averaging.held = PendingCommit()

    def drop(self) -> None:
        """Drop the step under way: neither model nor memories change, and its number is that of the next one."""
        self.averaging.drop()
        self.update_step.drop()
        self.controller.drop()
        self.record.dropped(self.step)
        self.record.samples = []

    def end_step(self, descended: bool = True) -> None:
        """Count the step, commit the memories' states, and apply the controller's decision."""
        held, self.averaging.held = self.averaging.held, PendingCommit()
        held.commit()
        self.averaging.has_renewed(held)
        self.controller.tell(held.words)
        self.controller.times.step_ends(self.loss)
        self.record.samples, self.loss = [], None
        self.controller.next = held.decided or self.controller.next
        self.record.skipped += not descended
        self.step += 1
        self.assigned = False
        if self.controller.next is not None and self.controller.may_adopt:  # else it waits
            self.controller.adopt(self.controller.next)

    # -- between steps -----------------------------------------------------------------------------------------------

    def quiesce(self) -> Program[None]:
        """Wait for averages and messages in flight without using their results; afterwards the state is complete."""
        for flight in self.in_flight.averages:
            yield from self.averaging.settle(flight)
        yield from self.recipe.schedule.quiesce(self.loop)

    def rest(self) -> Program[None]:
        """Pause this rank's steps."""
        if isinstance(self.recipe.schedule, Elastic):
            yield from self.recipe.schedule.rest(self.loop)

    def reopen(self) -> Program[None]:
        """Restart the schedule's programs between steps, which have ended."""
        if isinstance(self.recipe.schedule, Elastic):
            yield from self.recipe.schedule.reopen(self.loop)
        self.live.clear()

    def leave(self) -> Program[None]:
        """End the schedule's requests, before the comm threads end."""
        if self.size > 1:
            yield from self.recipe.schedule.leave(self.loop)

    def is_sending(self) -> bool:
        """True if an average or message is in flight that completes at a later step."""
        return bool(self.in_flight.averages or self.in_flight.posted or self.in_flight.arrived)

    def follow(self, params: Mapping[str, Param]) -> None:
        """Add parameters that are no longer frozen, in buckets of their own."""
        self.params |= params
        self.buckets += build(self.recipe, params, self.rate_groups(), self.size, self.params)

    def by_name(self, means: Sequence[Tensor]) -> dict[str, Tensor]:
        """The agreed gradient of every parameter, in its own shape."""
        pairs = zip(self.buckets, means, strict=True)
        return {name: view for bucket, mean in pairs for name, view in Bucket(mean, bucket.layout).tensors()}

    def residual_norm(self) -> float:
        """The norm of this rank's residuals, without the loss scale (and the rate, with units="update")."""
        states = [(bucket.memory, bucket.states["memory"]) for bucket in self.buckets]
        debts = [debt for memory, state in states if (debt := memory.residual(state)) is not None]
        debts += [(state[ARREARS], 1.0) for _, state in states if ARREARS in state]
        norms = read_numbers(*(residual.double().norm() for residual, _ in debts))
        units = [self.averaging.unit * unit for _, unit in debts]
        return sum((norm / unit) ** 2 for norm, unit in zip(norms, units, strict=True)) ** 0.5

    def _refuse_misfits(self) -> None:
        """Raise AttachError unless the recipe, and each kind of recipe that its controller may apply, fits this world."""
        sorts = {
            (repr(r.exchange), r.memory, type(r.schedule), r.rules): r
            for r in reversed([self.recipe, *self.recipe.reached])
        }
        whole = {name: param.whole_shape for name, param in self.params.items()}
        for recipe in sorts.values():
            own = recipe is self.recipe
            cut = self.buckets if own else build(recipe, self.params, self.rate_groups(), self.size)
            layouts, members = [bucket.layout for bucket in cut], [*optimizers.members(self.optimizer)]
            recipe.fits(Binding(self.size, layouts, members, shapes=whole))

    def rate_groups(self) -> dict[str, int]:
        """The optimizer's group of each parameter, where a part of the recipe uses its rate; else empty.

        Groups and not rates: two groups with equal rates may differ later.
        """
        if not self.recipe.follows_rate:
            return dict.fromkeys(self.params, 0)
        groups = {id(p): i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        return {n: groups.get(id(param.parameter), 0) for n, param in self.params.items()}
