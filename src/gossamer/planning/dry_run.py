"""Runs a schedule without training, and records its requests and their steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

import torch

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.canned_answers import answer_of
from gossamer.core.contracts import Context, Exchange, LosslessExchange, ReduceResult
from gossamer.core.errors import GossamerError
from gossamer.core.parts import require
from gossamer.core.programs import drive
from gossamer.core.verbs import Compute, Join, Now, OptimizerStep, Program, Start, TakeTicket, Verb
from gossamer.memories import NoMemory
from gossamer.planning.dry_loop import DryInFlight, DryLoop, DryRanks
from gossamer.planning.events import (
    AverageRequest,
    BackwardEnds,
    Event,
    MessageRequest,
    OptimizerSteps,
    Ready,
    StateRequest,
    StepEnds,
)
from gossamer.planning.recording import DeferredProgram, DeferredPrograms, EventRecorder
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


class DryRun:
    """A run on a model of a few numbers, one bucket each, that records a schedule's requests and sends nothing.

    With `lengths`, buckets have so many elements, and events say what the schedule itself computes.
    """

    def __init__(
        self,
        recipe: Recipe,
        size: int = 2,
        step: int = 1,
        *,
        parameters: int = 1,
        fragments: Sequence[int] = (0,),
        lengths: Sequence[int] = (),
    ) -> None:
        self.recipe, self.step, self.parameters, self.live = recipe, step, parameters, dict[str, Any]()
        self.recorder = EventRecorder(timed=bool(lengths))
        self.programs = DeferredPrograms(self.recorder, size)
        self.averages, self.mail, self.besides = list[AverageRequest](), list[MessageRequest](), list[Verb]()
        self.pooled = list[StateRequest]()  # averages of the optimizer's state
        cut = enumerate(zip(fragments, lengths or [1] * len(fragments), strict=True))
        self.buckets = [self._bucket(i, fragment, length) for i, (fragment, length) in cut]
        self.ranks, self.in_flight = DryRanks(size), DryInFlight()
        self.over: Exchange | None = None  # what gradients go through that go past the recipe
        self._loop = DryLoop(self)

    @staticmethod
    def of(recipe: Recipe, buckets: Sequence[BucketState], size: int, lengths: Sequence[int] = ()) -> "DryRun":
        """A run of a model's buckets, from the first step of its `span` on."""
        parameters, fragments = sum(len(bucket.names) for bucket in buckets), [bucket.fragment for bucket in buckets]
        first, _ = span(recipe)
        return DryRun(recipe, size, first, parameters=parameters, fragments=fragments, lengths=lengths)

    @property
    def events(self) -> list[Event]:
        return self.recorder.events

    def _bucket(self, index: int, fragment: int, length: int) -> BucketState:
        noting = NotingExchange(lambda: self._exchanged(index))
        layout, zeros = Layout.of({f"p{index}": (length,)}), torch.zeros(length, dtype=torch.float32)
        return BucketState(layout, (Plain(zeros),), noting, NoMemory(), 0.0, fragment)

    def _exchanged(self, index: int) -> None:
        self.averages.append(AverageRequest((index,)))
        self.programs.ask(AverageRequest((index,)))

    def take_step(self) -> None:
        schedule, loop = self.recipe.schedule, self._loop
        self._run(schedule.begin(loop))
        if schedule.averages(self.step):
            for i, bucket in enumerate(self.buckets):
                self.recorder.note(Ready(i))
                self._run(schedule.ready(loop, i, torch.zeros(bucket.layout.numel, dtype=torch.float32)))
        self.recorder.note(BackwardEnds())
        self._run(schedule.step(loop))
        self.recorder.note(StepEnds())
        self.step += 1

    def _run(self, steps: Program[None]) -> None:
        with self.recorder.working():
            drive(steps, self._answer)

    def _answer(self, verb: Verb) -> Any:
        match verb:
            case OptimizerStep():
                self.recorder.note(OptimizerSteps())
                return True
            case Start():
                return self.programs.start(verb)
            case Join(DeferredProgram() as handle):
                result = self.programs.end(handle, self.besides)
                self.recorder.wait([handle.key])
                return result
            case TakeTicket():
                self.recorder.wait([self.recorder.begin(verb)])
                self.programs.end_last(self.besides)
                return answer_of(verb, self.ranks.size)
            case Compute() | Now():
                return answer_of(verb, self.ranks.size)
            case _:
                raise GossamerError(
                    f"{self.recipe.schedule} makes the request {type(verb).__name__} itself; only requests through its "
                    "loop can be counted: use loop.averages or loop.messages"
                )
