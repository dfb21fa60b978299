"""The worker: runs a recipe's parts on a model's buckets, through requests that any fabric can answer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import ARREARS, Context, Exchange, Update
from gossamer.core.loop import Loop, Message, UntrainedTensors
from gossamer.core.rng import CounterRng
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.stream_events import read_numbers, record_stream_use
from gossamer.core.verbs import Among, Present, Program, all_gather, start
from gossamer.kernels.finite import all_finite, all_peaks_finite, peak
from gossamer.recipe import Recipe
from gossamer.runtime import optimizers
from gossamer.runtime.averaging import Averaging
from gossamer.runtime.buckets import build, settle
from gossamer.runtime.controller_runner import ControllerRunner
from gossamer.runtime.decay import Decay
from gossamer.runtime.finite_reports import FiniteReports
from gossamer.runtime.in_flight import InFlight, InFlightTable
from gossamer.runtime.measuring import relative_errors
from gossamer.runtime.optimizer_state import OptimizerState, gain
from gossamer.runtime.params import Param
from gossamer.runtime.pending_commit import PendingCommit
from gossamer.runtime.update_step import UpdateStep


class Worker:
    """One rank's side of a training run; schedules see it through a `Loop`."""

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
        self.recipe = recipe = recipe.bound({name: param.shape for name, param in params.items()})
        self.rank, self.size, self.seed = rank, size, seed  # index and number among the ranks present
        self.number, self.present = rank, Present.all_of(rank, size)
        self.params, self.optimizer = dict(params), optimizer
        self.momenta = OptimizerState(self.params, optimizer)
        self.step = 1  # the current step
        self.scale = 1.0  # the loss scaler's factor on gradients
        self.weights: Sequence[float] = ()  # the factor on each rank's values before averaging; empty: 1
        self.unit = 1.0  # the loss scale of the memories' state
        self.means: list[Tensor] = []
        self.finite = True
        self.loss: Tensor | float | None = None  # this step's loss, if the training loop reports it
        self.besides: Callable[[list[Tensor]], Program[list[Tensor]]] | None = (
            None  # further scalars that an integration reads from the device at a step
        )
        self.told = list[float]()  # and their values
        # How an integration sets the parameters' gradients to the means; this frees their own gradients' memory.
        self.hand_over: Callable[[], None] | None = None
        self.assigned = False  # did this step write parameters that all ranks agreed on?
        self.measure_every = 0  # interval in steps of measuring compression errors; 0: never
        self.measured = 0  # the step of the last measurement
        self.errors: dict[str, float] = {}  # relative compression error of each parameter, when last measured
        self.skipped = self.dropped_rounds = 0  # steps without optimizer step, and dropped averages of models
        self.spoilt = Counter[int]()  # the number of averages that each rank made non-finite
        self.reports = FiniteReports()
        self.row = Counter[int]()  # and how many of them in a row, up to the last average
        self.buckets = build(recipe, self.params, self.rate_groups(), self.size)
        self._refuse_misfits()
        self.loop = Loop(self)
        self.descent, self.steering, self.sending = UpdateStep(self), ControllerRunner(self), Averaging(self)
        self.decays = Decay(self)
        self.decays.refuse_unknown()
        self.untrained: UntrainedTensors | None = None
        self.live = dict[str, Any]()  # what the schedule keeps between steps
        self.dropped = list[int]()  # steps that ended without this rank's gradient
        self.accepted = Counter[int]()  # the number of steps with each rank's gradient, where not all are waited for
        self.last_accepted: tuple[int, ...] = ()
        self.closed = 0  # the number of those steps
        self.ages = Counter[int]()  # the ages in steps of models received, where they depend on timing
        self.on_age: Callable[[int, int, int], None] | None = None  # called with step, rank, age in steps
        self.samples = list[Any]()  # the current batch's samples, as reported by the integration
        self.dropped_samples = dict[int, list[Any]]()  # and those of batches that came too late, by step
        self.on_drop: Callable[[int, int, Sequence[Any]], None] | None = None  # called with step, rank, samples
        self.on_late: Callable[[int], None] | None = None
        self.on_presence: Callable[[int, int, Sequence[int], Sequence[int]], None] | None = (
            None  # called with step, rank, lost ranks, returned ranks
        )
        self.on_decision: Callable[[int, int, str], None] | None = (
            None  # called with step, rank, description of the new recipe
        )
        self.flights = InFlightTable()
        self._gradients = InFlight()  # this step's averages
        self._held = PendingCommit()

    @property
    def weight(self) -> float:
        """This rank's weight; the average over ranks is 1."""
        return self.weights[self.rank] if self.weights else 1.0

    # -- for schedules ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device for tensors that belong to no single parameter."""
        return next(iter(self.params.values())).device

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def rate(self, index: int) -> float:
        return self.buckets[index].rate(self.optimizer)

    def gain(self, index: int) -> float:
        bucket = self.buckets[index]
        memory = bucket.memory.gain if self.size > 1 else 1.0  # a single rank does not use it
        return gain(self.optimizer.param_groups[bucket.group]) * memory

    def decay(self, index: int) -> float:
        return float(self.optimizer.param_groups[self.buckets[index].group].get("weight_decay", 0.0))

    @property
    def update(self) -> Update | None:
        return self.recipe.update

    def updates(self, which: Sequence[int]) -> list[State]:
        self._held.settle()
        return [self.buckets[i].states["update"] for i in which]

    def agreed(self) -> None:
        self.assigned = True

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging a bucket's gradient; the mean may be written over it."""
        flat = self._weighted(flat)
        self.steering.note(index, flat)
        given = self.descent.outgoing(index, flat, self.scale) if over is None else flat
        yield from self.sending.launch(self._gradients, index, given, over)

    def average_gradients(self) -> Program[None]:
        sums: Sequence[Tensor] = ()
        if self.size > 1 or self._gradients.handles:
            summing = yield from self.steering.ask()
            self._held = yield from self.sending.arrive(self._gradients)
            self.means, self._gradients = [*self._gradients.means.values()], InFlight()
            self.decays.take_out(self.means)
            sums = yield from self.steering.told(summing)
        else:
            self.means = self.steering.look_alone()
            self.finite = all_finite(self.means)
        if self.finite and self.means:
            if self.hand_over is not None and "control" in self.recipe.controller.traits:
                self.hand_over()
            state = self.steering.draft()
            self._held.decided = self.steering.decide(self.means, sums, state)
            self._held.drafts.append(state)

    def deliver(self, means: Sequence[Tensor], finite: bool, rates: Sequence[float]) -> None:
        self.means, self.finite = list(means), finite
        self.decays.take_out(self.means)
        self.set_rates(rates)

    def accept(self, ranks: Sequence[int]) -> None:
        self.accepted.update(ranks)
        self.last_accepted = tuple(ranks)
        self.closed += 1

    def age(self, steps: int) -> None:
        self.ages[steps] += 1
        if self.on_age is not None:
            self.on_age(self.step, self.rank, steps)

    def regroup(self, present: Present) -> None:
        """Continue with the ranks present, numbered among themselves; owners of chunks change."""
        before, self.present = self.present, present
        if before.ranks != present.ranks:
            for bucket in self.buckets:
                settle(bucket, self.size)
            self.rank, self.size = present.place, len(present.ranks)
            for bucket in self.buckets:
                bucket.shift = bucket.memory.follow(bucket.exchange.omega(bucket.layout, self.size))
        lost, back = before.without(present), present.without(before)
        if (lost or back) and self.on_presence is not None:
            self.on_presence(self.step, self.number, lost, back)

    def drop(self, step: int) -> None:
        self.dropped.append(step)
        if self.samples:
            self.dropped_samples[step] = self.samples
        if self.on_drop is not None:
            self.on_drop(step, self.rank, self.samples)
        if self.on_late is not None:
            self.on_late(step)

    def launch(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        values = [self._weighted(value) for value in values]
        flight = InFlight(given=[peak(value) for value in values])
        if self.size == 1:  # the mean over one rank, without codec or memory
            flight.means, flight.lost = dict(zip(which, values, strict=True)), not all_finite(values)
            self.flights.add(which, flight)
            return
        for index, value in zip(which, values, strict=True):
            yield from self.sending.launch(flight, index, value, over)
        self.flights.add(which, flight)

    def local_average(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        return (yield from self.sending.near(which, values, over))

    def land(self, which: Sequence[int]) -> Program[list[Tensor] | None]:
        flights = self.flights.of(which)
        for flight in flights:
            yield from self.sending.settle(flight)
        self.flights.pop(which)
        lost = any(flight.lost for flight in flights)
        if lost:
            self.dropped_rounds += 1
            if self.size == 1:
                self.momenta.heal()
            given = [value for flight in flights for value in flight.given]
            yield from self.name_spoilers(all_peaks_finite(given))
        landed = {i: mean for flight in flights for i, mean in flight.means.items()}
        means = None if lost or not flights else [landed[i] for i in which]
        means = self.steering.adopt_for(means)
        if means is not None:
            loss = yield from self.steering.mean_loss()
            self.steering.next = self.steering.decide(means, loss=loss)
        return means

    def give_up(self) -> None:
        self.dropped_rounds += 1
        self.momenta.heal()

    def report_finite(self, rank: int | None, fine: bool | Tensor) -> None:
        self.reports.hear(self.number if rank is None else rank, self.step, fine)
        if rank is None and fine is False:
            self.momenta.heal()

    def count_spoilers(self) -> dict[int, int]:
        """How many averages each rank has spoilt, and of how many steps its model was left out."""
        return dict(sorted((self.spoilt + self.reports.count()).items()))

    def _weighted(self, flat: Tensor) -> Tensor:
        return flat if self.weight == 1 else flat.mul_(self.weight)

    def residuals(self, which: Sequence[int]) -> list[Tensor]:
        self._held.settle()
        out = list[Tensor]()
        for bucket in (self.buckets[i] for i in which):
            debt = bucket.memory.residual(bucket.states["memory"])
            out.append(bucket.empty() if debt is None else debt[0] / (self.unit * debt[1]))
        return out

    def settle(self, which: Sequence[int]) -> None:
        for bucket in (self.buckets[i] for i in which):
            state = bucket.states["memory"]
            if (debt := bucket.memory.residual(state)) is not None:
                bucket.memory.inherit(state, debt[0], -1.0)
                record_stream_use([debt[0]])  # a comm thread made it, and it is released here

    def in_flight(self, which: Sequence[int]) -> bool:
        return bool(self.flights.of(which))

    def post(self, which: Sequence[int], message: Message, models: Sequence[Tensor] | None) -> Program[None]:
        lane = self.recipe.schedule.lane or "comm"
        for place, i in enumerate(which):
            c = self.buckets[i]
            model = c.read() if models is None else models[place]
            program = message(Bucket(model, c.layout), c.states["mixer"], self.context(i))
            self.flights.post(i, (yield from start(program, c.name, self.step, lane)))

    def collect(self, which: Sequence[int]) -> Program[list[list[Tensor]]]:
        yield from self.flights.join_messages(which)
        return self.flights.collect(which)

    def arrived(self, which: Sequence[int]) -> list[list[Tensor]]:
        return self.flights.arrived(which)

    def has_posted(self, which: Sequence[int]) -> bool:
        return self.flights.has_posted(which)

    def has_come(self, which: Sequence[int]) -> bool:
        return self.flights.has_come(which)

    def wait(self, which: Sequence[int]) -> Program[None]:
        yield from self.flights.join_messages(which)

    def quiesce(self) -> Program[None]:
        """Wait for averages and messages in flight without using their results; afterwards the state is complete."""
        for flight in self.flights.averages:
            yield from self.sending.settle(flight)
        yield from self.recipe.schedule.quiesce(self.loop)

    def rest(self) -> Program[None]:
        """Pause this rank's steps."""
        yield from self.recipe.schedule.rest(self.loop)

    def reopen(self) -> Program[None]:
        """Restart the schedule's programs between steps, which have ended."""
        yield from self.recipe.schedule.reopen(self.loop)
        self.live.clear()

    def leave(self) -> Program[None]:
        """End the schedule's requests, before the comm threads end."""
        if self.size > 1:
            yield from self.recipe.schedule.leave(self.loop)

    def reset_optimizer(self) -> None:
        self.momenta.reset()

    def average_optimizer(self) -> Program[None]:
        yield from self.momenta.average(self.size, self.weight, self.step)

    # -- for integrations -------------------------------------------------------------------------------------------

    def context(self, index: int) -> Context:
        rng = CounterRng(self.seed, self.step, self.rank)
        bucket = self.buckets[index]
        rate = bucket.rate(self.optimizer)
        return Context(self.rank, self.size, self.step, rng, lr=rate, shift=bucket.shift, scale=self.scale)

    def plain_context(self, step: int) -> Context:
        return Context(self.rank, self.size, step, CounterRng(self.seed, step, self.rank))

    def set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def measures(self, step: int) -> bool:
        """True if the compression error of what starts at this step is measured. Asked at the start, since it may run at later steps.

        It is that of the first step at or after each multiple of `measure_every` at which anything starts: rounds of local
        steps need not end at a multiple.
        """
        every = self.measure_every
        if every and step // every != self.measured // every:
            self.measured = step
        return bool(every) and step == self.measured

    def measure(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None:
        """Record each parameter's compression error. Runs on the comm thread: other threads may read the old errors."""
        self.errors = self.errors | relative_errors(block, add_sent)

    def begin(self) -> Program[None]:
        """Begin a step, before the forward pass."""
        yield from self.recipe.schedule.begin(self.loop)

    def ready(self, index: int, flat: Tensor) -> Program[None]:
        """Handle a bucket's gradient, which is complete and may be overwritten."""
        self.decays.enter(index, flat)
        yield from self.recipe.schedule.ready(self.loop, index, flat)

    def steps(self) -> Program[None]:
        """Run one step of the recipe's schedule."""
        return self.recipe.schedule.step(self.loop)

    def train_step(
        self, gradients: Sequence[Tensor], descend: Callable[[], bool], step: Callable[[], object]
    ) -> Program[None]:
        """Run one whole step without hooks: send gradients, run the schedule, call the optimizer when it says so.

        `step` is the optimizer's, for updates that this rank has missed.
        """
        if self.recipe.schedule.averages(self.step) and self.size > 1:
            for i, flat in enumerate(gradients):
                yield from self.ready(i, flat)
        steps = self.steps()
        while missed := (yield from until_optimizer_step(steps)):
            self.descent.make_up(missed, step)
        descended = descend()
        if not descended:
            self.discard()
        yield from after_optimizer_step(steps, descended)
        self.end_step(descended)

    def redirect(self) -> None:
        """Apply the recipe's update to the gradients, before the optimizer step.

        Means that are not finite stay as they are, so that a loss scaler sees them. Own gradients are not checked.
        """
        if self.finite or not self.recipe.schedule.averages(self.step):
            self._held.drafts += self.descent.redirect()

    def discard(self) -> None:
        """Drop this step's gradients and the changes that memories and controllers made for them."""
        self._held = PendingCommit()

    def end_step(self, descended: bool = True) -> None:
        """Count the step, commit the memories' states, and apply the controller's decision."""
        held, self._held = self._held, PendingCommit()
        held.commit()
        self.samples, self.loss = [], None
        self.steering.next = held.decided or self.steering.next
        self.skipped += not descended
        self.step += 1
        self.assigned = False
        if self.steering.next is not None and not self.flights.averages:  # else it waits until those are done
            self.steering.adopt(self.steering.next)

    def name_spoilers(self, fine: bool, among: Among = None) -> Program[None]:
        """Count which ranks made an average non-finite. `fine`: this rank's input is finite.

        For gradients this runs among the ranks that average them together.
        """
        flag = torch.tensor([not fine], dtype=torch.uint8, device=self.device)
        answers = yield from all_gather(flag, among)
        ranks = among or range(self.size)
        guilty = [rank for rank, flag in zip(ranks, answers, strict=True) if int(flag)]
        self.spoilt.update(guilty)
        self.row = Counter({rank: self.row[rank] + 1 for rank in guilty})

    def follow(self, params: Mapping[str, Param]) -> None:
        """Add parameters that are no longer frozen, in buckets of their own."""
        self.params |= params
        self.buckets += build(self.recipe, params, self.rate_groups(), self.size, self.params)

    def is_sending(self) -> bool:
        """True if an average or message is in flight that completes at a later step."""
        return bool(self.flights.averages) or self.flights.messages

    def by_name(self, means: Sequence[Tensor]) -> dict[str, Tensor]:
        """The agreed gradient of every parameter, in its own shape."""
        pairs = zip(self.buckets, means, strict=True)
        return {name: view for c, mean in pairs for name, view in Bucket(mean, c.layout).tensors()}

    def residual_norm(self) -> float:
        """The norm of this rank's residuals, without the loss scale (and the rate, with units="update")."""
        debts = [debt for c in self.buckets if (debt := c.memory.residual(c.states["memory"])) is not None]
        debts += [(owed, 1.0) for c in self.buckets if (owed := c.states["memory"].get(ARREARS)) is not None]
        norms = read_numbers(*(debt.double().norm() for debt, _ in debts))
        return sum((norm / (self.unit * unit)) ** 2 for norm, (_, unit) in zip(norms, debts, strict=True)) ** 0.5

    def _refuse_misfits(self) -> None:
        """Raise AttachError unless the recipe, and each kind of recipe that its controller may apply, fits this world."""
        sorts = {
            (type(r.exchange), r.memory, type(r.schedule)): r for r in reversed([self.recipe, *self.recipe.reached])
        }
        for recipe in sorts.values():
            own = recipe is self.recipe
            cut = self.buckets if own else build(recipe, self.params, self.rate_groups(), self.size)
            recipe.fits(Binding(self.size, [c.layout for c in cut], [*optimizers.members(self.optimizer)]))

    def rate_groups(self) -> dict[str, int]:
        """The optimizer's group of each parameter, where a part of the recipe uses its rate; else empty.

        Groups and not rates: two groups with equal rates may differ later.
        """
        if not self.recipe.follows_rate:
            return dict.fromkeys(self.params, 0)
        groups = {id(p): i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        return {n: groups.get(id(param.parameter), 0) for n, param in self.params.items()}
