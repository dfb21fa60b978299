"""The training as a schedule sees it on a worker, for all buckets or some of them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Exchange, Update
from gossamer.core.loop import Averages, ErrorMeter, Loop, Message, Messages, OptimizerView, UntrainedTensors
from gossamer.core.stream_events import record_stream_use
from gossamer.core.verbs import MembersChanged, Program, join, start
from gossamer.runtime.buckets import BucketState
from gossamer.runtime.optimizer_state import gain
from gossamer.runtime.optimizers import rate_of

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class WorkerLoop(Loop):
    """A worker's training, in which this rank's averages count `counts` times."""

    def __init__(self, worker: "Worker", which: Sequence[int] | None = None, counts: float = 1.0) -> None:
        self._worker, self._which, self._counts = worker, which, counts
        self.ranks, self.record, self.live = worker.ranks, worker.record, worker.live
        self.averages, self.messages = WorkerAverages(worker, self, counts), WorkerMessages(worker, self)
        self.optimizer = WorkerOptimizer(worker, self)

    @property
    def which(self) -> Sequence[int]:
        return range(len(self._worker.buckets)) if self._which is None else self._which

    @property
    def buckets(self) -> list[BucketState]:
        return [self._worker.buckets[i] for i in self.which]

    @property
    def step(self) -> int:
        return self._worker.step

    @step.setter
    def step(self, step: int) -> None:
        self._worker.step = step

    @property
    def untrained(self) -> UntrainedTensors | None:
        return self._worker.untrained

    def part(self, which: Iterable[int]) -> "WorkerLoop":
        return WorkerLoop(self._worker, [self.which[i] for i in which], self._counts)

    def counting(self, times: float) -> "WorkerLoop":
        return WorkerLoop(self._worker, self._which, self._counts * times)

    def assign(self, values: Sequence[Tensor]) -> None:
        for bucket, value in zip(self.buckets, values, strict=True):
            bucket.write(value)
        self._worker.assigned = True


class WorkerAverages(Averages):
    """Averages of some of a worker's buckets, in which this rank's values count `counts` times."""

    def __init__(self, worker: "Worker", loop: WorkerLoop, counts: float) -> None:
        self._worker, self._loop, self._counts = worker, loop, counts

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        yield from self._worker.averaging.send_gradient(self._loop.which[index], flat, over)

    def wait_gradients(self) -> Program[None]:
        yield from self._worker.averaging.wait_gradients()

    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        if self._counts != 1:
            values = [value.mul_(self._counts) for value in values]
        yield from self._worker.averaging.launch(self._loop.which, values, over)

    def of(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[list[Tensor] | None]:
        """Average; after a change of members once more, among those who are there, with what each has given.

        Not on a rank that has taken another's state meanwhile, as one that was frozen and counted as lost: its step is over.
        """
        averaging, taken = self._worker.averaging, self._worker.averaging.taken
        while True:
            yield from self.launch(values, over)
            try:
                return (yield from self.wait())
            except MembersChanged:
                if not averaging.keeps or averaging.taken != taken:
                    raise

    def wait(self) -> Program[list[Tensor] | None]:
        return (yield from self._worker.averaging.land(self._loop.which))

    def in_flight(self) -> bool:
        return bool(self._worker.in_flight.of(self._loop.which))

    def local(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        return (yield from self._worker.averaging.local(self._loop.which, values, over))

    def residuals(self) -> list[Tensor]:
        self._worker.averaging.held.settle()
        out = list[Tensor]()
        for bucket in self._loop.buckets:
            debt = bucket.memory.residual(bucket.states["memory"])
            out.append(bucket.empty() if debt is None else debt[0] / (self._worker.averaging.unit * debt[1]))
        return out

    def clear_residuals(self) -> None:
        for bucket in self._loop.buckets:
            state = bucket.states["memory"]
            if (debt := bucket.memory.residual(state)) is not None:
                bucket.memory.inherit(state, debt[0], -1.0)
                record_stream_use([debt[0]])  # a comm thread made it, and it is released here

    def error_meter(self, step: int) -> ErrorMeter | None:
        return self._worker.measurement.meter(step)


class WorkerMessages(Messages):
    """Messages of some of a worker's buckets."""

    def __init__(self, worker: "Worker", loop: WorkerLoop) -> None:
        self._worker, self._loop, self._flights = worker, loop, worker.in_flight

    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        worker = self._worker
        lane = worker.recipe.schedule.shape.lane or "comm"
        for place, i in enumerate(self._loop.which):
            bucket = worker.buckets[i]
            model = bucket.read() if models is None else models[place]
            program = message(Bucket(model, bucket.layout), bucket.states["mixer"], worker.context(i))
            self._flights.posted[i] = yield from start(program, bucket.name, worker.step, lane)

    def wait(self) -> Program[None]:
        for i in self._loop.which:
            if i in self._flights.posted:
                self._flights.arrived[i] = yield from join(self._flights.posted.pop(i))

    def collect(self) -> Program[list[list[Tensor]]]:
        yield from self.wait()
        arrived, which = self._flights.arrived, self._loop.which
        return [arrived.pop(i, []) for i in which] if any(i in arrived for i in which) else []

    def arrived(self) -> list[list[Tensor]]:
        return [self._flights.arrived.get(i, []) for i in self._loop.which]

    def has_posted(self) -> bool:
        return any(i in self._flights.posted or i in self._flights.arrived for i in self._loop.which)

    def has_come(self) -> bool:
        handles = [self._flights.posted[i] for i in self._loop.which if i in self._flights.posted]
        return self.has_posted() and all(handle.done() or handle.overdue() for handle in handles)


class WorkerOptimizer(OptimizerView):
    """The optimizer of some of a worker's buckets."""

    def __init__(self, worker: "Worker", loop: WorkerLoop) -> None:
        self._worker, self._loop = worker, loop

    @property
    def rates(self) -> list[float]:
        return [rate_of(group) for group in self._worker.optimizer.param_groups]

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._worker.optimizer.param_groups
        return [groups[bucket.group] for bucket in self._loop.buckets]

    @property
    def lrs(self) -> list[float]:
        return [rate_of(group) for group in self._groups()]

    @property
    def gains(self) -> list[float]:
        alone = self._worker.size == 1  # a single rank does not use its memory
        pairs = zip(self._groups(), self._loop.buckets, strict=True)
        return [gain(group) * (1.0 if alone else bucket.memory.gain) for group, bucket in pairs]

    @property
    def decays(self) -> list[float]:
        return [float(group.get("weight_decay", 0.0)) for group in self._groups()]

    @property
    def update(self) -> Update | None:
        return self._worker.recipe.update

    @property
    def update_states(self) -> list[State]:
        self._worker.averaging.held.settle()
        return [bucket.states["update"] for bucket in self._loop.buckets]

    def give(self, means: Sequence[Tensor], finite: bool = True, rates: Sequence[float] = ()) -> None:
        worker = self._worker
        worker.averaging.means, worker.averaging.finite = list(means), finite
        worker.decay.take_out(means)
        if rates:
            worker.set_rates(rates)

    def reset(self) -> None:
        self._worker.optimizer_state.reset()

    def average(self, moments: Sequence[int] = ()) -> Program[None]:
        yield from self._worker.optimizer_state.average(moments)
