"""The worker: drives a recipe's parts over a model's channels, as requests that any fabric can answer."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from gossamer.core.block import Block, Draft, State
from gossamer.core.contracts import Echo, Exchange, Facts, Mixer, Quorum, Seat
from gossamer.core.draw import Draw
from gossamer.core.verbs import Program, Start, Ticket, all_gather, join, start
from gossamer.recipe import Recipe
from gossamer.worker import optimizers
from gossamer.worker.channels import Channel, build
from gossamer.worker.finite import all_finite, all_peaks_finite, peak
from gossamer.worker.halves import rest, until_descend
from gossamer.worker.held import Held
from gossamer.worker.measuring import relative_errors
from gossamer.worker.momenta import Momenta, gain
from gossamer.worker.moments import ask
from gossamer.worker.quorum import Stand

Carried = tuple[Tensor, Tensor]  # an agreed mean and its largest absolute value, taken while other channels travel


class Worker:
    """One rank's side of a training run; it is the `Loop` that schedules see."""

    def __init__(
        self,
        recipe: Recipe,
        parameters: Mapping[str, Tensor],
        optimizer: optimizers.Optimizing,
        rank: int,
        size: int,
        seed: int = 0,
    ) -> None:
        for each in optimizers.members(optimizer):
            recipe.suits(each)
        self.recipe, self.rank, self.size, self.seed = recipe, rank, size, seed
        self.origin = recipe  # as it was given; a controller may put another in force
        self.named, self.optimizer = dict(parameters), optimizer
        self.momenta = Momenta(self.named, optimizer)
        self.step = 1  # the step that is being computed
        self.scale = 1.0  # what gradients are multiplied by: a loss scaler's factor
        self.control: State = {}
        self.means: list[Tensor] = []
        self.finite = True
        self.besides: Callable[[], Program[list[Tensor]]] | None = None  # what else a host asks of its device at a step
        self.told = list[float]()  # and the answer
        self.assigned = False  # did this step write parameters that all ranks agreed on?
        self.measure_every = 0  # steps after which compression errors are measured anew; 0: never
        self.measured = 0  # the step of the last measurement
        self.errors: dict[str, float] = {}  # relative compression error of each parameter, when last measured
        self.skipped = self.dropped_rounds = 0  # steps that did not descend, and averages of models that nobody took
        self.spoilt = Counter[int]()  # how many averages each rank has spoilt with values that are not finite
        self.row = Counter[int]()  # and how many it has in a row, up to the last
        self.channels = build(recipe, self.named, self._rate_groups(), self.size)
        self.stand = Stand(self) if isinstance(recipe.exchange, Quorum) else None
        self._tickets = dict[int, Ticket[Carried]]()
        self._drafts = dict[int, tuple[Draft, Draft]]()
        self._flight: list[Ticket[Carried]] = []
        self._landed: list[Tensor] | None = None
        self._lost = False
        self._given = list[Tensor]()  # the largest absolute values of what this rank launched last
        self._messages: list[Ticket[list[Tensor]]] = []
        self._arrived: list[list[Tensor]] | None = None
        self._held = Held()

    # -- what schedules see ------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where what is not about one parameter is computed."""
        return next(iter(self.named.values())).device

    @property
    def lrs(self) -> list[float]:
        return [c.rate(self.optimizer) for c in self.channels]

    @property
    def gains(self) -> list[float]:
        groups = self.optimizer.param_groups
        memories = [c.memory.gain if self.size > 1 else 1.0 for c in self.channels]  # alone, nothing goes through them
        return [gain(groups[c.group]) * m for c, m in zip(self.channels, memories)]

    @property
    def states(self) -> list[State]:
        return [c.states["schedule"] for c in self.channels]

    @property
    def mixer(self) -> Mixer:
        assert isinstance(self.recipe.exchange, Mixer)
        return self.recipe.exchange

    def parameters(self) -> list[Tensor]:
        inner = (
            self.recipe.exchange
            if isinstance(self.recipe.exchange, Mixer)
            else getattr(self.recipe.schedule, "inner", None)
        )
        if inner is None:
            return [c.read() for c in self.channels]
        return [inner.numerator(Block(c.read(), c.layout), c.states["mixer"]) for c in self.channels]

    def assign(self, values: Sequence[Tensor]) -> None:
        for channel, value in zip(self.channels, values, strict=True):
            channel.write(value)
            channel.states["mixer"].clear()
        self.assigned = True

    def average_gradients(self) -> Program[None]:
        if self.stand is not None:
            yield from self.stand.average_gradients()
        elif self.size > 1 or self._tickets:
            yield from self._arrive([self._tickets[i] for i in range(len(self.channels))], hold=True)
        else:
            self._look_at_own_gradients()
        if self.finite and self.means:
            control = Draft(self.control)
            self._held.decided = self._decide(self.means, control)
            self._held.drafts.append(control)

    def average(self, values: Sequence[Tensor]) -> Program[list[Tensor] | None]:
        yield from self.launch(values)
        return (yield from self.land())

    def launch(self, values: Sequence[Tensor]) -> Program[None]:
        self._flight, self._given = [], [peak(value) for value in values]
        for i, value in enumerate(values):
            self._flight.append((yield self.program(i, value, reuse=True)))

    def land(self) -> Program[list[Tensor] | None]:
        yield from self.quiesce()
        if self._lost:
            self.dropped_rounds += 1
            yield from self.name_spoilers(all_peaks_finite(self._given))
        means, self._landed, self._lost = self._landed, None, False
        if self._next is not None:  # decided while these were under way
            means = self._recut(means, self._adopt(self._next))
        if means is not None:
            self._next = self._decide(means, self.control)
        return means

    def quiesce(self) -> Program[None]:
        """Wait for what is in flight, without letting it land: afterwards the state is all there is."""
        if self._flight:
            yield from self._arrive(self._flight)
            self._flight, means, self.means = (
                [],
                self.means,
                [],
            )  # they are the schedule's, and gone when it has used them
            self._landed, self._lost = (means, False) if self.finite else (None, True)
            if self._lost:
                self.momenta.heal()
        if self._messages:
            self._arrived = []
            for ticket in self._messages:
                self._arrived.append((yield from join(ticket)))
            self._messages = []

    def in_flight(self) -> bool:
        return bool(self._flight) or self._landed is not None or self._lost

    def mix(self, mixer: Mixer, round: int) -> Program[None]:
        yield from self.launch_mix(mixer, round)
        yield from self.land_mix(mixer)

    def launch_mix(self, mixer: Mixer, round: int) -> Program[None]:
        self._messages = []
        for i, c in enumerate(self.channels):
            push = mixer.push(Block(c.read(), c.layout), c.states["mixer"], self.seat(i), round)
            self._messages.append((yield from start(push, c.name, self.step)))

    def land_mix(self, mixer: Mixer) -> Program[None]:
        yield from self.quiesce()
        arrived, self._arrived = self._arrived, None
        for c, wires in zip(self.channels, arrived or []):
            _absorb(mixer, c, wires)

    def settle_mix(self, mixer: Mixer) -> None:
        for c in self.channels:
            _absorb(mixer, c, [])

    def reset_optimizer(self) -> None:
        self.momenta.reset()

    def average_optimizer(self) -> Program[None]:
        yield from self.momenta.average(self.size)

    # -- what hosts call ---------------------------------------------------------------------------------------------

    def seat(self, index: int) -> Seat:
        draw = Draw(self.seed, self.step, self.rank)
        channel = self.channels[index]
        return Seat(self.rank, self.size, self.step, draw, self.scale, channel.rate(self.optimizer), channel.shift)

    def program(self, index: int, flat: Tensor, reuse: bool = False) -> Start:
        """The request that sends one channel's values on their way; its state waits in drafts until all have arrived.

        With `reuse`, the mean may be written over the values.
        """
        channel, measures = self.channels[index], self.measures(self.step)
        exchange, block = channel.exchange, Block(flat, channel.layout, flat if reuse and not measures else None)
        assert isinstance(exchange, Exchange)
        kept, carried = Draft(channel.states["memory"]), Draft(channel.states["exchange"])
        self._drafts[index] = kept, carried

        found = list[Tensor]()

        def send(block: Block, seat: Seat) -> Program[Echo]:
            echo = yield from exchange.average(block, carried, seat)
            if channel.memory.hands_on and echo.largest is not None:
                found.append(echo.largest)
            if measures:
                self.measure(block, echo.add_sent)
            return echo

        average = channel.memory.around(block, kept, send, self.seat(index))
        return Start(_carry(average, flat, found), channel.name, self.step)

    def measures(self, step: int) -> bool:
        """Is the error measured of what starts at this step? Asked at the start, for it may run when others have begun.

        It is that of the first step at or after each multiple of `measure_every` at which anything starts: rounds of local
        steps need not end at a multiple.
        """
        every = self.measure_every
        if every and step // every != self.measured // every:
            self.measured = step
        return bool(every) and step == self.measured

    def measure(self, block: Block, add_sent: Callable[[Tensor, float], None]) -> None:
        """Note what got lost of each parameter. On the lane's thread: others may be reading the errors there were."""
        self.errors = self.errors | relative_errors(block, add_sent)

    def expect(self, index: int, ticket: Ticket[Carried]) -> None:
        """Note a gradient that is on its way, for `average_gradients` to join."""
        self._tickets[index] = ticket

    def train_step(self, gradients: Sequence[Tensor], descend: Callable[[], Any]) -> Program[None]:
        """One whole step, for fabrics that need no hooks: send gradients, run the schedule, descend when it says so."""
        if self.recipe.schedule.averages_gradients and self.size > 1:
            for i, flat in enumerate(gradients):
                if self.stand is not None:
                    yield from self.stand.offer(flat)
                else:
                    self.expect(i, (yield self.program(i, flat)))
        steps = self.recipe.schedule.step(self)
        yield from until_descend(steps)
        descended = descend() is not False
        if not descended:
            self.discard()
        yield from rest(steps, descended)
        self.end_step(descended)

    def discard(self) -> None:
        """Nobody will use this step's gradients: memories and controllers are as if they had not been."""
        self._held = Held()

    def end_step(self, descended: bool = True) -> None:
        """Count the step, let memories move on, and adopt what the controller decided in it."""
        held, self._held = self._held, Held()
        held.commit()
        self._next = held.decided or self._next
        self.skipped += not descended
        self.step += 1
        self.assigned = False
        if self._next is not None and not self.in_flight():  # else it waits until those have landed
            self._adopt(self._next)

    def name_spoilers(self, fine: bool) -> Program[None]:
        """An average is not finite: count whose doing it was. `fine`: what this rank gave is finite."""
        answers = yield from all_gather(torch.tensor([not fine], dtype=torch.uint8, device=self.device))
        guilty = [rank for rank, flag in enumerate(answers) if int(flag)]
        self.spoilt.update(guilty)
        self.row = Counter({rank: self.row[rank] + 1 for rank in guilty})

    def follow(self, named: Mapping[str, Tensor]) -> None:
        """Parameters that were frozen train from now on, in channels of their own."""
        self.named |= named
        self.channels += build(self.recipe, named, self._rate_groups(), self.size)

    def is_sending(self) -> bool:
        """Whether anything is on its way that will land at a later step."""
        return self.in_flight() or bool(self._messages) or self._arrived is not None

    def pending(self) -> tuple[list[Tensor] | None, list[list[Tensor]] | None]:
        """What has arrived and not landed, after `quiesce`."""
        return self._landed, self._arrived

    @property
    def lost(self) -> bool:
        """Whether what was due to land is not finite, after `quiesce`."""
        return self._lost

    def restore_pending(
        self, landed: list[Tensor] | None, arrived: list[list[Tensor]] | None, lost: bool = False
    ) -> None:
        self._landed, self._arrived, self._flight, self._messages = landed, arrived, [], []
        self._lost = lost

    def mean_by_name(self) -> dict[str, Tensor]:
        """The agreed gradient of every parameter, in its own shape."""
        pairs = zip(self.channels, self.means, strict=True)
        return {name: view for c, mean in pairs for name, view in Block(mean, c.layout).tensors()}

    def residual_norm(self) -> float:
        """The length of everything this rank still owes, free of the loss scale (and of the rate, with units="update")."""
        memories = [c.states["memory"] for c in self.channels if "residual" in c.states["memory"]]
        norms = ask(*(m["residual"].double().norm() for m in memories))
        return sum((norm / float(m.get("unit", 1.0))) ** 2 for norm, m in zip(norms, memories, strict=True)) ** 0.5

    @property
    def due(self) -> Recipe:
        """The recipe that will be in force when nothing is in flight any more."""
        return self._next or self.recipe

    def restore_recipe(self, recipe: Recipe, due: Recipe) -> None:
        """A controller's choice, from a checkpoint."""
        self._next = due if due != recipe else None
        if self.recipe != recipe:
            self.recipe = recipe
            self.channels = build(recipe, self.named, self._rate_groups(), self.size)

    # -- the inside ------------------------------------------------------------------------------------------------

    _next: Recipe | None = None

    def _arrive(self, tickets: Sequence[Ticket[Carried]], hold: bool = False) -> Program[None]:
        """All or nothing: memories move on only if every channel's agreed mean is finite, which all ranks see alike.

        With `hold` they wait for the end of the step: what was averaged may be thrown away.
        """
        self.means, peaks = [], list[Tensor]()
        for ticket in tickets:
            mean, largest = yield from join(ticket)
            self.means.append(mean)
            peaks.append(largest)
        also = [] if self.besides is None else (yield from self.besides())
        answers, self.besides = ask(*peaks, *also), None
        self.finite, self.told = all(map(isfinite, answers[: len(peaks)])), answers[len(peaks) :]
        if self.finite:
            self.row.clear()
        held = Held([draft for pair in self._drafts.values() for draft in pair] if self.finite else [])
        if hold:
            self._held = held
        else:
            held.commit()
        self._drafts.clear()
        self._tickets.clear()

    def _look_at_own_gradients(self) -> None:
        """A host alone sends nothing; who may change the optimizer's steps must see the gradients all the same."""
        self.means = []
        if self.recipe.controller.moves_schedule:
            self.means = [c.gather([_gradient(p) for p in c.parameters]) for c in self.channels]
        self.finite = all_finite(self.means)

    def _decide(self, means: Sequence[Tensor], control: State) -> Recipe | None:
        """The controller's next recipe, where it is another one."""
        if "control" not in self.recipe.controller.traits:
            return None  # before all means are copied, free of the loss scale, for nobody
        blocks = [Block(m / self.scale if self.scale != 1 else m, c.layout) for m, c in zip(means, self.channels)]
        decided = self.recipe.controller.decide(Facts(self.step, self._largest_rate(), blocks), self.recipe, control)
        return decided if decided != self.recipe else None

    def _largest_rate(self) -> float:
        return max(float(g["lr"]) for g in self.optimizer.param_groups)

    def _adopt(self, recipe: Recipe) -> list[Channel]:
        """Put another recipe in force; returns the channels there were."""
        from gossamer.worker.checkpoint import carry_over

        old, before, self._next, self.recipe = self.channels, self.recipe, None, recipe
        if (recipe.exchange, recipe.routes) != (before.exchange, before.routes):  # else all go on as they went
            self.channels = build(recipe, self.named, self._rate_groups(), self.size)
            carry_over(old, self.channels, self.size)
        return old

    def _recut(self, means: list[Tensor] | None, old: Sequence[Channel]) -> list[Tensor] | None:
        """Values of the old channels, laid out as the new ones are."""
        if means is None:
            return None
        pairs = zip(old, means, strict=True)
        named = {name: view for c, mean in pairs for name, view in Block(mean, c.layout).tensors()}
        return [c.gather([named[s.name] for s in c.layout.segments]) for c in self.channels]

    def _rate_groups(self) -> dict[str, int]:
        """The optimizer's group of each parameter, where a part of the recipe follows its rate; else they need not be told apart.

        Not the rates: two groups that start with one may part later.
        """
        if not self.recipe.follows_rate:
            return dict.fromkeys(self.named, 0)
        groups = {id(p): i for i, g in enumerate(self.optimizer.param_groups) for p in g["params"]}
        return {n: groups.get(id(p), 0) for n, p in self.named.items()}


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _absorb(mixer: Mixer, channel: Channel, wires: Sequence[Tensor]) -> None:
    state = channel.states["mixer"]
    model = mixer.absorb(Block(channel.read(), channel.layout), state, wires)
    channel.write(model)
    mixer.wrote(Block(channel.read() if channel.narrow else model, channel.layout), state)


def _carry(average: Program[Tensor], given: Tensor, found: Sequence[Tensor]) -> Program[Carried]:
    """`given` is kept here until the program is joined: a lane may be done with it before its device is.

    `found` is the mean's largest magnitude, if the exchange came across it.
    """
    mean = yield from average
    return mean, found[0].view(()).double() if found else peak(mean)
