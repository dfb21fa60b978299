"""Runs a schedule without training, and records its requests and their steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, ReduceResult, Update
from gossamer.core.errors import GossamerError
from gossamer.core.loop import (
    Averages,
    ErrorMeter,
    Loop,
    Message,
    Messages,
    OptimizerView,
    Ranks,
    RecordView,
    UntrainedTensors,
)
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
    every = recipe.schedule.shape.period
    warmup = ceil(recipe.schedule.shape.prelude / every) * every
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
        self.parameters = parameters
        self.recipe, self.step, self.live = recipe, step, dict[str, Any]()
        self.averages, self.mail, self.besides = list[AverageRequest](), list[MessageRequest](), list[Verb]()
        self.buckets = [self._channel(i, fragment) for i, fragment in enumerate(fragments or [0] * blocks)]
        self.pooled = 0  # how often the optimizer's state was averaged
        self.ranks = DryRanks(size)
        self.launched, self.wires = dict[int, Tensor](), dict[int, list[Tensor]]()
        self.over: Exchange | None = None  # what gradients go through that go past the recipe
        self._loop = DryLoop(self)
        self._last: DeferredProgram | None = None  # the program started last

    @property
    def size(self) -> int:
        return self.ranks.size

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
                        "loop can be counted: use loop.averages or loop.messages"
                    )

        drive(steps, answer)

    def _end(self, handle: DeferredProgram | None, sent: list[Verb]) -> Any:
        if handle is None:
            return None
        if not handle.ended:
            handle.result, handle.ended = self.alone(handle.program, sent), True
        return handle.result

    def alone(self, program: Program[Any], sent: list[Verb]) -> Any:
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


class DryLoop(Loop):
    """The loop of a dry run, for all buckets or some of them."""

    def __init__(self, run: DryRun, which: Sequence[int] | None = None) -> None:
        self.run, self._which, self.live, self.ranks = run, which, run.live, run.ranks
        self.averages, self.messages = DryAverages(self), DryMessages(self)
        self.optimizer, self.record = DryOptimizer(self), DryRecord()

    @property
    def which(self) -> Sequence[int]:
        return range(len(self.run.buckets)) if self._which is None else self._which

    @property
    def buckets(self) -> list[BucketState]:
        return [self.run.buckets[i] for i in self.which]

    @property
    def step(self) -> int:
        return self.run.step

    @step.setter
    def step(self, step: int) -> None:
        self.run.step = step

    @property
    def untrained(self) -> UntrainedTensors | None:
        return None

    def part(self, which: Iterable[int]) -> "DryLoop":
        return DryLoop(self.run, [self.which[i] for i in which])

    def counting(self, times: float) -> "DryLoop":
        return self

    def assign(self, values: Sequence[Tensor]) -> None:
        self.write(values)


class DryRanks(Ranks):
    """Rank 0 of a world that never changes."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.weights, self.present = 0, size, (), Present.all_of(0, size)

    def regroup(self, present: Present) -> None:
        pass

    def context(self, step: int) -> Context:
        return Context(self.rank, self.size, step, CounterRng(0, step, self.rank))


class DryAverages(Averages):
    """Records averages; each rank's values are the mean."""

    def __init__(self, loop: DryLoop) -> None:
        self._loop, self._run = loop, loop.run

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        self._run.over = over
        yield from ()

    def wait_gradients(self) -> Program[None]:
        run, controller = self._run, self._run.recipe.controller
        run.averages.append(AverageRequest(tuple(range(len(run.buckets))), run.over))
        if counts := controller.counts:
            of = run.parameters if controller.counts_each else len(run.buckets)
            run.besides.append(AllReduce(torch.zeros(of, counts, dtype=torch.float64)))
        yield from ()

    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        self._run.averages.append(AverageRequest(tuple(self._loop.which), over))
        self._run.launched |= dict(zip(self._loop.which, values))
        yield from ()

    def wait(self) -> Program[list[Tensor] | None]:
        yield from ()
        run = self._run
        landed = [run.launched.pop(i) for i in self._loop.which if i in run.launched]
        if landed and run.recipe.controller.hears_loss:
            run.besides.append(AllReduce(torch.zeros(2, dtype=torch.float64)))
        return landed or None

    def in_flight(self) -> bool:
        return any(i in self._run.launched for i in self._loop.which)

    def local(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        self._run.averages.append(AverageRequest(tuple(self._loop.which), over))
        yield from ()
        return list(values)

    def residuals(self) -> list[Tensor]:
        return [torch.zeros(1, dtype=torch.float32) for _ in self._loop.which]

    def clear_residuals(self) -> None:
        pass

    def error_meter(self, step: int) -> ErrorMeter | None:
        return None


class DryMessages(Messages):
    """Records messages, and runs their programs with canned answers."""

    def __init__(self, loop: DryLoop) -> None:
        self._loop, self._run = loop, loop.run

    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        run = self._run
        run.mail.append(MessageRequest(tuple(self._loop.which), message))
        for place, i in enumerate(self._loop.which):
            bucket = run.buckets[i]
            model = bucket.read() if models is None else models[place]
            said = message(Bucket(model, bucket.layout), bucket.states["mixer"], run.ranks.context(run.step))
            run.wires[i] = run.alone(said, [])
        yield from ()

    def wait(self) -> Program[None]:
        yield from ()

    def collect(self) -> Program[list[list[Tensor]]]:
        yield from ()
        return [self._run.wires.pop(i) for i in self._loop.which if i in self._run.wires]

    def arrived(self) -> list[list[Tensor]]:
        return [self._run.wires.get(i, []) for i in self._loop.which]

    def has_posted(self) -> bool:
        return any(i in self._run.wires for i in self._loop.which)

    def has_come(self) -> bool:
        return self.has_posted()


class DryOptimizer(OptimizerView):
    """An optimizer with a learning rate of 1 and without state; a dry run has no numbers to measure."""

    def __init__(self, loop: DryLoop) -> None:
        self._run, self._count = loop.run, len(loop.which)

    @property
    def rates(self) -> list[float]:
        return [1.0]

    @property
    def lrs(self) -> list[float]:
        return [1.0] * self._count

    @property
    def gains(self) -> list[float]:
        return [1.0] * self._count

    @property
    def decays(self) -> list[float]:
        return [0.0] * self._count

    @property
    def update(self) -> Update | None:
        return None

    @property
    def update_states(self) -> list[State]:
        return [{} for _ in range(self._count)]

    def give(self, means: Sequence[Tensor], finite: bool = True, rates: Sequence[float] = ()) -> None:
        pass

    def reset(self) -> None:
        pass

    def average(self) -> Program[None]:
        self._run.pooled += 1
        yield from ()


class DryRecord(RecordView):
    """Records nothing."""

    def closed(self, ranks: Sequence[int]) -> None:
        pass

    def dropped(self, step: int) -> None:
        pass

    def aged(self, steps: int) -> None:
        pass

    def finite(self, rank: int | None, fine: bool | Tensor) -> None:
        pass

    def round_dropped(self) -> None:
        pass
