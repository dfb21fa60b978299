"""Runs a schedule without training, and records its requests and their steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, ReduceResult, Update
from gossamer.core.errors import GossamerError
from gossamer.core.loop import Loop, Message, UntrainedTensors
from gossamer.core.lossless import LosslessExchange
from gossamer.core.parts import require
from gossamer.core.programs import drive
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import (
    AllReduce,
    Compute,
    Handle,
    Join,
    Now,
    OptimizerStep,
    Present,
    Program,
    Start,
    TakeTicket,
    Verb,
)
from gossamer.memories import NoMemory
from gossamer.planning.canned_answers import answer_of
from gossamer.recipe import Recipe
from gossamer.runtime.buckets import BucketState
from gossamer.runtime.params import Plain

MOST = 1_000_000  # steps, which take about ten seconds
LEAST = 60  # steps to rehearse: whole periods of every topology that has up to six kinds of rounds


def span(recipe: Recipe) -> tuple[int, int]:
    """The first and the last step of the dry run: whole rounds, after the warm-up."""
    every = recipe.schedule.period
    warmup = ceil(recipe.schedule.prelude / every) * every
    require(
        every <= MOST, f"{recipe.schedule}: a round of more than {MOST:,} steps is not counted, for that takes too long"
    )
    return warmup + 1, warmup + every * ceil(LEAST / every)


class AverageRequest(NamedTuple):
    """An average of some buckets; through the schedule's own exchange `over`, if given."""

    which: tuple[int, ...]
    over: Exchange | None = None


class MessageRequest(NamedTuple):
    """Messages of some buckets to peers."""

    which: tuple[int, ...]
    message: Message


@dataclass(frozen=True, repr=False)
class NotingExchange(LosslessExchange):
    """Stands in for a bucket's exchange and records that it was called."""

    name: ClassVar[str] = "noting"

    tell: Callable[[], None]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        self.tell()
        yield from ()
        return ReduceResult(block.flat.clone(), lambda into, weight: None)


@dataclass(eq=False)
class DeferredProgram(Handle[Any]):
    """A program that runs when it is joined, or when its result is requested."""

    program: Program[Any]
    result: Any = None
    ended: bool = False

    def done(self) -> bool:
        return self.ended


class DryRun:
    """A run on a model of a few numbers, one bucket each, that records a schedule's requests and sends nothing."""

    def __init__(
        self,
        recipe: Recipe,
        blocks: int = 1,
        size: int = 2,
        step: int = 1,
        parameters: int = 1,
        fragments: Sequence[int] = (),
    ) -> None:
        self._parameters = parameters
        self.recipe, self.rank, self.size, self.step = recipe, 0, size, step
        self.averages, self.mail, self.besides = list[AverageRequest](), list[MessageRequest](), list[Verb]()
        self.buckets = [self._channel(i, fragment) for i, fragment in enumerate(fragments or [0] * blocks)]
        self.pooled = 0  # how often the optimizer's state was averaged
        self.live, self.rates = dict[str, Any](), [1.0]
        self.weights: Sequence[float] = ()
        self.present = Present.all_of(0, size)
        self.untrained: UntrainedTensors | None = None
        self._flights, self._wires = dict[int, Tensor](), dict[int, list[Tensor]]()
        self._loop = Loop(self)
        self._last: DeferredProgram | None = None  # the program started last
        self._over: Exchange | None = None  # what gradients go through that go past the recipe

    def _channel(self, index: int, fragment: int) -> BucketState:
        noting = NotingExchange(lambda: self.averages.append(AverageRequest((index,))))
        layout = Layout.of({f"p{index}": (1,)})
        return BucketState(layout, (Plain(torch.zeros(1, dtype=torch.float32)),), noting, NoMemory(), 0.0, fragment)

    def take_step(self) -> None:
        schedule, loop = self.recipe.schedule, self._loop
        self._run(schedule.begin(loop))
        if schedule.averages(self.step):
            for i in range(len(self.buckets)):
                self._run(schedule.ready(loop, i, torch.zeros(1, dtype=torch.float32)))
        self._run(schedule.step(loop))
        self.step += 1

    def _run(self, steps: Program[None]) -> None:
        def answer(verb: Verb) -> Any:
            match verb:
                case OptimizerStep():
                    return True
                case Start(program):
                    self._last = DeferredProgram(program)
                    return self._last
                case Join(DeferredProgram() as handle):
                    return self._end(handle, self.besides)
                case TakeTicket():
                    self._end(self._last, self.besides)
                    return answer_of(verb, self.size)
                case Compute() | Now():
                    return answer_of(verb, self.size)
                case _:
                    raise GossamerError(
                        f"{self.recipe.schedule} makes the request {type(verb).__name__} itself; only requests through its "
                        "loop can be counted: use loop.average, loop.launch or loop.post"
                    )

        drive(steps, answer)

    def _end(self, handle: DeferredProgram | None, sent: list[Verb]) -> Any:
        if handle is None:
            return None
        if not handle.ended:
            handle.result, handle.ended = self._alone(handle.program, sent), True
        return handle.result

    def _alone(self, program: Program[Any], sent: list[Verb]) -> Any:
        """Run a program of a comm thread and record its requests, except those of exchanges, whose size depends on the model."""

        def answer(verb: Verb) -> Any:
            match verb:
                case Start(started):
                    self._last = DeferredProgram(started)
                    return self._last
                case Join(DeferredProgram() as handle):
                    return self._end(handle, sent)
                case _:
                    sent.append(verb)
                    return answer_of(verb, self.size)

        return drive(program, answer)

    @property
    def _everything(self) -> tuple[int, ...]:
        return tuple(range(len(self.buckets)))

    def rate(self, index: int) -> float:
        return 1.0

    def gain(self, index: int) -> float:
        return 1.0

    def decay(self, index: int) -> float:
        return 0.0

    @property
    def update(self) -> Update | None:
        return None  # a dry run has no numbers to measure

    def updates(self, which: Sequence[int]) -> list[State]:
        return [{} for _ in which]

    def context(self, index: int) -> Context:
        return self.plain_context(self.step)

    def plain_context(self, step: int) -> Context:
        return Context(self.rank, self.size, step, CounterRng(0, step, self.rank))

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        self._over = over
        yield from ()

    def average_gradients(self) -> Program[None]:
        self.averages.append(AverageRequest(self._everything, self._over))
        if counts := self.recipe.controller.counts:
            of = self._parameters if self.recipe.controller.counts_each else len(self.buckets)
            self.besides.append(AllReduce(torch.zeros(of, counts, dtype=torch.float64)))
        yield from ()

    def residuals(self, which: Sequence[int]) -> list[Tensor]:
        return [torch.zeros(1, dtype=torch.float32) for _ in which]

    def settle(self, which: Sequence[int]) -> None:
        pass

    def launch(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange | None) -> Program[None]:
        self.averages.append(AverageRequest(tuple(which), over))
        self._flights |= dict(zip(which, values))
        yield from ()

    def local_average(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        self.averages.append(AverageRequest(tuple(which), over))
        yield from ()
        return list(values)

    def land(self, which: Sequence[int]) -> Program[list[Tensor] | None]:
        yield from ()
        landed = [self._flights.pop(i) for i in which if i in self._flights]
        if landed and self.recipe.controller.hears_loss:
            self.besides.append(AllReduce(torch.zeros(2, dtype=torch.float64)))
        return landed or None

    def in_flight(self, which: Sequence[int]) -> bool:
        return any(i in self._flights for i in which)

    def post(self, which: Sequence[int], message: Message, models: Sequence[Tensor] | None) -> Program[None]:
        self.mail.append(MessageRequest(tuple(which), message))
        for place, i in enumerate(which):
            c = self.buckets[i]
            model = c.read() if models is None else models[place]
            said = message(Bucket(model, c.layout), c.states["mixer"], self.context(i))
            self._wires[i] = self._alone(said, [])
        yield from ()

    def collect(self, which: Sequence[int]) -> Program[list[list[Tensor]]]:
        yield from ()
        return [self._wires.pop(i) for i in which if i in self._wires]

    def arrived(self, which: Sequence[int]) -> list[list[Tensor]]:
        return [self._wires.get(i, []) for i in which]

    def has_posted(self, which: Sequence[int]) -> bool:
        return any(i in self._wires for i in which)

    def has_come(self, which: Sequence[int]) -> bool:
        return self.has_posted(which)

    def wait(self, which: Sequence[int]) -> Program[None]:
        yield from ()

    def deliver(self, means: Sequence[Tensor], finite: bool, rates: Sequence[float]) -> None:
        pass

    def drop(self, step: int) -> None:
        pass

    def accept(self, ranks: Sequence[int]) -> None:
        pass

    def age(self, steps: int) -> None:
        pass

    def regroup(self, present: Present) -> None:
        pass

    def agreed(self) -> None:
        pass

    def give_up(self) -> None:
        pass

    def report_finite(self, rank: int | None, fine: bool | Tensor) -> None:
        pass

    def reset_optimizer(self) -> None:
        pass

    def average_optimizer(self) -> Program[None]:
        self.pooled += 1
        yield from ()

    def measures(self, step: int) -> bool:
        return False

    def measure(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None:
        pass
