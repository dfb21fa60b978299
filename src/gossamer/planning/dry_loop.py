"""What a schedule sees in a dry run: objects that record its requests and send nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Exchange, Update
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
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import AllReduce, Present, Program
from gossamer.planning.events import AverageRequest, MessageRequest, StateRequest
from gossamer.runtime.buckets import BucketState

if TYPE_CHECKING:
    from gossamer.planning.dry_run import DryRun


class DryLoop(Loop):
    """The loop of a dry run, for all buckets or some of them."""

    def __init__(self, run: "DryRun", which: Sequence[int] | None = None) -> None:
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


@dataclass(eq=False)
class DryInFlight:
    """Averages and messages that were not waited for yet, by bucket: what they hold, and the keys of their programs."""

    launched: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    flying: dict[int, int] = field(default_factory=dict[int, int])
    wires: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    posted: dict[int, int] = field(default_factory=dict[int, int])
    sending: list[int] = field(default_factory=list[int])  # the keys of this step's gradients


class DryRanks(Ranks):
    """Rank 0 of a world that never changes."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.weights, self.present = 0, size, (), Present.all_of(0, size)

    def regroup(self, present: Present, left: Sequence[int] = ()) -> None:
        pass

    def context(self, step: int) -> Context:
        return Context(self.rank, self.size, step, CounterRng(0, step, self.rank))


class DryAverages(Averages):
    """Records averages; each rank's values are the mean."""

    def __init__(self, loop: DryLoop) -> None:
        self._loop, self._run = loop, loop.run
        self._recorder, self._held = loop.run.recorder, loop.run.in_flight

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        self._run.over = over
        self._held.sending.append(self._recorder.begin(AverageRequest((index,), over)))
        yield from ()

    def wait_gradients(self) -> Program[None]:
        run, controller = self._run, self._run.recipe.controller
        run.averages.append(AverageRequest(tuple(range(len(run.buckets))), run.over))
        if counts := controller.counts:
            of = run.parameters if controller.counts_each else len(run.buckets)
            run.besides.append(told := AllReduce(torch.zeros(of, counts, dtype=torch.float64)))
            self._held.sending.append(self._recorder.begin(told))
        self._recorder.wait(self._held.sending)
        self._held.sending.clear()
        yield from ()

    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        self._run.averages.append(AverageRequest(tuple(self._loop.which), over))
        self._held.launched |= dict(zip(self._loop.which, values))
        self._held.flying |= {i: self._recorder.begin(AverageRequest((i,), over)) for i in self._loop.which}
        yield from ()

    def wait(self) -> Program[list[Tensor] | None]:
        yield from ()
        run = self._run
        landed = [self._held.launched.pop(i) for i in self._loop.which if i in self._held.launched]
        if landed:
            self._recorder.wait([self._held.flying.pop(i) for i in self._loop.which if i in self._held.flying])
        if landed and run.recipe.controller.hears_loss:
            run.besides.append(told := AllReduce(torch.zeros(2, dtype=torch.float64)))
            self._recorder.wait([self._recorder.begin(told)])
        return landed or None

    def in_flight(self) -> bool:
        return any(i in self._held.launched for i in self._loop.which)

    def local(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        self._run.averages.append(AverageRequest(tuple(self._loop.which), over))
        self._recorder.wait([self._recorder.begin(AverageRequest((i,), over)) for i in self._loop.which])
        yield from ()
        return list(values)

    def residuals(self) -> list[Tensor]:
        return [self._run.buckets[i].empty() for i in self._loop.which]

    def clear_residuals(self) -> None:
        pass

    def error_meter(self, step: int) -> ErrorMeter | None:
        return None


class DryMessages(Messages):
    """Records messages, and runs their programs with canned answers."""

    def __init__(self, loop: DryLoop) -> None:
        self._loop, self._run = loop, loop.run
        self._recorder, self._held = loop.run.recorder, loop.run.in_flight

    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        run = self._run
        run.mail.append(MessageRequest(tuple(self._loop.which), message))
        for place, i in enumerate(self._loop.which):
            lane = run.recipe.schedule.shape.lane or "comm"
            self._held.posted[i] = self._recorder.begin(MessageRequest((i,), message), lane=lane)
            bucket = run.buckets[i]
            model = bucket.read() if models is None else models[place]
            with self._recorder.apart():
                said = message(Bucket(model, bucket.layout), bucket.states["mixer"], run.ranks.context(run.step))
                self._held.wires[i] = run.programs.run(said, [])
        yield from ()

    def wait(self) -> Program[None]:
        if keys := [self._held.posted.pop(i) for i in self._loop.which if i in self._held.posted]:
            self._recorder.wait(keys)
        yield from ()

    def collect(self) -> Program[list[list[Tensor]]]:
        yield from self.wait()
        return [self._held.wires.pop(i) for i in self._loop.which if i in self._held.wires]

    def arrived(self) -> list[list[Tensor]]:
        return [self._held.wires.get(i, []) for i in self._loop.which]

    def has_posted(self) -> bool:
        return any(i in self._held.wires for i in self._loop.which)

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
        return self._run.recipe.update

    @property
    def update_states(self) -> list[State]:
        return [{} for _ in range(self._count)]

    def give(self, means: Sequence[Tensor], finite: bool = True, rates: Sequence[float] = ()) -> None:
        pass

    def reset(self) -> None:
        pass

    def average(self, moments: Sequence[int] = ()) -> Program[None]:
        asked = StateRequest(tuple(moments))
        self._run.pooled.append(asked)
        self._run.recorder.wait([self._run.recorder.begin(asked)])
        yield from ()


class DryRecord(RecordView):
    """Records nothing."""

    def closed(self, ranks: Sequence[int]) -> None:
        pass

    def dropped(self, step: int) -> None:
        pass

    def aged(self, steps: int) -> None:
        pass

    def finite(self, rank: int | None, fine: bool | Tensor) -> bool | Tensor:
        return fine

    def round_dropped(self) -> None:
        pass
