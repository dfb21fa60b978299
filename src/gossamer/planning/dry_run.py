"""Runs a schedule without training, and records its requests and their steps."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from math import ceil
from time import thread_time
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.canned_answers import answer_of
from gossamer.core.contracts import Context, Exchange, ReduceResult
from gossamer.core.errors import GossamerError
from gossamer.core.lossless import LosslessExchange
from gossamer.core.parts import require
from gossamer.core.programs import drive
from gossamer.core.verbs import (
    Compute,
    Handle,
    Join,
    Now,
    OptimizerStep,
    Program,
    Start,
    TakeTicket,
    Verb,
)
from gossamer.memories import NoMemory
from gossamer.planning.dry_loop import DryLoop, DryRanks
from gossamer.planning.events import (
    AverageRequest,
    BackwardEnds,
    Busy,
    Event,
    Launch,
    MessageRequest,
    OptimizerSteps,
    Ready,
    Request,
    StateRequest,
    StepEnds,
    Wait,
)
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


@dataclass(frozen=True, repr=False)
class NotingExchange(LosslessExchange):
    """Stands in for a bucket's exchange and records that it was called."""

    name: ClassVar[str] = "noting"

    tell: Callable[[], None]

    def average(self, block: Bucket, state: State, context: Context) -> Program[ReduceResult]:
        self.tell()
        yield from ()
        return ReduceResult(block.flat.clone(), lambda into, weight: None)


class StopWatch:
    """The processor seconds of this thread, without what is done while it is stopped."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._began = thread_time()

    def lap(self) -> float:
        """Seconds since the start or the last lap."""
        began, self._began = self._began, thread_time()
        return self._began - began

    @contextmanager
    def stopped(self) -> Generator[None]:
        stopped = thread_time()
        yield
        self._began += thread_time() - stopped


@dataclass(eq=False)
class DeferredProgram(Handle[Any]):
    """A program that runs when it is joined, or when its result is requested."""

    program: Program[Any]
    key: int = 0
    result: Any = None
    ended: bool = False
    requests: list[Request] = field(default_factory=list[Request])

    def done(self) -> bool:
        return self.ended


class DryRun:
    """A run on a model of a few numbers, one bucket each, that records a schedule's requests and sends nothing.

    With `lengths`, buckets have so many elements, and events say what the schedule itself computes.
    """

    def __init__(
        self,
        recipe: Recipe,
        blocks: int = 1,
        size: int = 2,
        step: int = 1,
        parameters: int = 1,
        fragments: Sequence[int] = (),
        lengths: Sequence[int] = (),
    ) -> None:
        self.parameters = parameters
        self.lengths = lengths or [1] * (len(fragments) or blocks)
        self.recipe, self.step, self.live = recipe, step, dict[str, Any]()
        self.averages, self.mail, self.besides = list[AverageRequest](), list[MessageRequest](), list[Verb]()
        self.buckets = [self._channel(i, fragment) for i, fragment in enumerate(fragments or [0] * blocks)]
        self.pooled = list[StateRequest]()  # averages of the optimizer's state
        self.ranks = DryRanks(size)
        self.launched, self.wires = dict[int, Tensor](), dict[int, list[Tensor]]()
        self.over: Exchange | None = None  # what gradients go through that go past the recipe
        self._loop = DryLoop(self)
        self._last: DeferredProgram | None = None  # the program started last
        self.events = list[Event]()
        self.sending = list[int]()  # the programs that this step's gradients wait for
        self.posted = dict[int, int]()  # those of messages that were not collected yet, by bucket
        self.flying = dict[int, int]()  # those of launched averages, by bucket
        self._laps: StopWatch | None = StopWatch() if lengths else None
        self._running = list[Request]()  # the requests of the deferred program that runs now
        self._keys = count()

    @property
    def size(self) -> int:
        return self.ranks.size

    def _channel(self, index: int, fragment: int) -> BucketState:
        noting = NotingExchange(lambda: self._exchanged(index))
        layout = Layout.of({f"p{index}": (self.lengths[index],)})
        return BucketState(layout, (Plain(self._zeros(index)),), noting, NoMemory(), 0.0, fragment)

    def _zeros(self, index: int) -> Tensor:
        return torch.zeros(self.lengths[index], dtype=torch.float32)

    def _exchanged(self, index: int) -> None:
        self.averages.append(AverageRequest((index,)))
        self._running.append(AverageRequest((index,)))

    def begin(self, *requests: Request, lane: str = "comm") -> int:
        """Note that a program with these requests starts; returns its key."""
        key = next(self._keys)
        self._lap()
        self.events.append(Launch(key, lane, list(requests)))
        return key

    def wait(self, keys: Iterable[int]) -> None:
        self._lap()
        self.events.append(Wait(tuple(keys)))

    def _lap(self) -> None:
        """Note what the schedule has computed since the last event."""
        if self._laps is not None and (seconds := self._laps.lap()) > 0:
            self.events.append(Busy(seconds))

    def take_step(self) -> None:
        schedule, loop = self.recipe.schedule, self._loop
        self._run(schedule.begin(loop))
        if schedule.averages(self.step):
            for i in range(len(self.buckets)):
                self.events.append(Ready(i))
                self._run(schedule.ready(loop, i, self._zeros(i)))
        self.events.append(BackwardEnds())
        self._run(schedule.step(loop))
        self.events.append(StepEnds())
        self.step += 1

    def _run(self, steps: Program[None]) -> None:
        def answer(verb: Verb) -> Any:
            match verb:
                case OptimizerStep():
                    self._lap()
                    self.events.append(OptimizerSteps())
                    return True
                case Start():
                    return self._deferred(verb)
                case Join(DeferredProgram() as handle):
                    result = self._end(handle, self.besides)
                    self.wait([handle.key])
                    return result
                case TakeTicket():
                    self.wait([self.begin(verb)])
                    self._end(self._last, self.besides)
                    return answer_of(verb, self.size)
                case Compute() | Now():
                    return answer_of(verb, self.size)
                case _:
                    raise GossamerError(
                        f"{self.recipe.schedule} makes the request {type(verb).__name__} itself; only requests through its "
                        "loop can be counted: use loop.averages or loop.messages"
                    )

        if self._laps is not None:
            self._laps.start()
        drive(steps, answer)
        self._lap()

    def _deferred(self, verb: Start) -> DeferredProgram:
        self._lap()
        launch = Launch(next(self._keys), verb.lane, [])
        self.events.append(launch)
        self._last = DeferredProgram(verb.program, launch.key, requests=launch.requests)
        return self._last

    def apart(self) -> AbstractContextManager[None]:
        """While it is open, what is computed is not the schedule's own work: another thread does it."""
        return nullcontext() if self._laps is None else self._laps.stopped()

    def _end(self, handle: DeferredProgram | None, sent: list[Verb]) -> Any:
        if handle is None:
            return None
        if not handle.ended:
            before, self._running = self._running, handle.requests
            with self.apart():
                handle.result, handle.ended = self.alone(handle.program, sent), True
            self._running = before
        return handle.result

    def alone(self, program: Program[Any], sent: list[Verb]) -> Any:
        """Run a program of a comm thread and record its requests, except those of exchanges, whose size depends on the model."""

        def answer(verb: Verb) -> Any:
            match verb:
                case Start():
                    return self._deferred(verb)
                case Join(DeferredProgram() as handle):
                    return self._end(handle, sent)
                case _:
                    sent.append(verb)
                    self._running.append(verb)
                    return answer_of(verb, self.size)

        return drive(program, answer)
