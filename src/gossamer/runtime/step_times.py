"""Times a worker's steps for a controller that decides by times, and lets all ranks exchange what they measured.

It measures with requests for the clock, so that a simulation's times are virtual and exact; on a GPU, which works behind the
host, by events on its streams.
"""

import platform
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf, isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, PendingState, State
from gossamer.core.canned_answers import answer_with_wires
from gossamer.core.contracts import CandidateCost, Context, Exchange, Memory, RankTimes, ReduceResult, TimesDue
from gossamer.core.contracts.times import NAN
from gossamer.core.groups import place
from gossamer.core.programs import drive
from gossamer.core.stream_events import DeviceMoment, read_numbers
from gossamer.core.verbs import AllGather, Compute, Handle, Program, Verb, all_reduce, join, now, start
from gossamer.costs.crossing import traffic
from gossamer.kernels.finite import peak
from gossamer.runtime.buckets import BucketState
from gossamer.runtime.in_flight import Carried

if TYPE_CHECKING:
    from gossamer.recipe import Recipe
    from gossamer.runtime.worker import Worker

KEPT = 64  # steps whose times are kept
LABEL = "times"
Way = tuple[Exchange, Memory]  # that a parameter's gradient goes through
Span = tuple[DeviceMoment | None, DeviceMoment]


class StepWait(NamedTuple):
    """Of one step: its seconds, from the end of the last wait to the end of its own, and those of its wait.

    Under rounds of local steps it is the mean of the steps since the last wait.
    """

    seconds: float
    waited: float


class WaitMoments(NamedTuple):
    """When the last wait ended, and when that of this step began and ended, some `steps` later."""

    last: DeviceMoment | None
    began: DeviceMoment | None
    ended: DeviceMoment
    steps: int

    def measured(self) -> StepWait:
        return StepWait(_seconds(self.last, self.ended) / self.steps, _seconds(self.began, self.ended) / self.steps)


class DueAnswer(NamedTuple):
    """What a controller wants in a step, and what it was asked with."""

    step: int
    recipe: "Recipe"
    state: State
    due: TimesDue


class StepTimes:
    """One rank's times since the ranks last exchanged them. Without a controller that hears times it asks for nothing."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._began: DeviceMoment | None = None  # when the last step's wait ended
        self._wait_began: DeviceMoment | None = None
        self._last = worker.step - 1  # the step in which the last wait ended
        self._rows = deque[WaitMoments](maxlen=KEPT)
        self._losses = deque[Tensor | float | None](maxlen=KEPT)  # of each row: the mean of those told in its steps
        self._told: tuple[Tensor | float, int] = 0.0, 0  # since the last row: the sum of losses, and their number
        # By block: from the end of the last step's wait to its start, and from its start to its end.
        self._ready, self._sending = defaultdict[int, list[Span]](list), defaultdict[int, list[Span]](list)
        self._costs = dict[int, CandidateCost]()
        self._latency = NAN
        self._copy: Tensor | None = None  # of the largest block's gradient, for candidates to be run on
        self._running: Handle[None] | None = None
        self.virtual: Callable[[Any], float] = lambda candidate: 0.0  # seconds of its work, in a simulation
        self._asked: DueAnswer | None = None

    @property
    def due(self) -> TimesDue:
        """What the controller wants in this step; it is asked once, before the first block starts."""
        worker = self._worker
        if not worker.recipe.controller.hears_times or worker.size == 1:
            return TimesDue()
        step, recipe, state, known = worker.step, worker.recipe, worker.controller.state, self._asked
        if known is None or known.step != step or known.recipe is not recipe or known.state is not state:
            known = self._asked = DueAnswer(step, recipe, state, recipe.controller.due(step, recipe, state))
        return known.due

    # -- a step ------------------------------------------------------------------------------------------------------

    def around(self, index: int, program: Program[Carried], flat: Tensor) -> Program[Program[Carried]]:
        """The program that averages a block, which is about to start; timed, where that is due."""
        due = self.due
        if due.runs and index == self._largest():
            yield from self._join_run()  # of the step before, so that there is one copy at a time
            self._copy = flat.clone()  # not of the bucket's pool, which would keep the memory
        if not due.times_blocks:
            return program
        self._ready[index].append((self._began, (yield from self._now())))
        return self._timed(index, program)

    def _timed(self, index: int, program: Program[Carried]) -> Program[Carried]:
        began = yield from self._now()
        mean, largest = yield from program
        self._sending[index].append((began, (yield from self._now())))
        return mean, largest

    def _now(self) -> Program[DeviceMoment]:
        return DeviceMoment(self._worker.device, (yield from now()))

    def wait_begins(self) -> Program[None]:
        """Note the time at which the loop begins to wait; candidates run behind the averages that it waits for."""
        if not self._worker.recipe.controller.hears_times:
            return
        yield from self._join_run()
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self._running = yield from start(self._run(self.due, copy), LABEL, self._worker.step)
        self._wait_began = yield from self._now()

    def wait_ends(self) -> Program[Sequence[RankTimes]]:
        """Note the step's times; returns those of all ranks, at the steps at which they exchange them."""
        if not self._worker.recipe.controller.hears_times:
            return ()
        ended, step = (yield from self._now()), self._worker.step
        steps, self._last = max(step - self._last, 1), step
        self._rows.append(WaitMoments(self._began, self._wait_began, ended, steps))
        (total, told), self._told = self._told, (0.0, 0)
        self._losses.append(total / told if told else None)
        due, self._asked = self.due, None  # the state changes now, and a step that is skipped comes again
        times = (yield from self._exchange(due)) if due.rows else ()
        self._began = yield from self._now()
        return times

    def step_ends(self, loss: Tensor | float | None) -> None:
        if self._worker.recipe.controller.hears_times and loss is not None:
            total, told = self._told
            self._told = total + (loss.double() if isinstance(loss, Tensor) else loss), told + 1

    # -- candidates --------------------------------------------------------------------------------------------------

    def _join_run(self) -> Program[None]:
        running, self._running = self._running, None
        if running is not None:
            yield from join(running)

    def _largest(self) -> int:
        return max(range(len(self._worker.buckets)), key=lambda i: self._worker.buckets[i].layout.numel)

    def _run(self, due: TimesDue, copy: Tensor) -> Program[None]:
        """Run candidates on a copy of a gradient as if all ranks sent the same. Of three times the least counts: the first one loads
        what it needs, and others may have to wait for a processor.

        Where it is due, all ranks then average their copies under each of them.
        """
        index, device = self._largest(), self._worker.device
        layout = self._worker.buckets[index].layout
        block = Bucket(copy, Layout(layout.segments, layout.dtype))  # with a pool of its own, which goes with it
        shapes = {name: param.whole_shape for name, param in self._worker.params.items()}
        context = self._worker.context(index)
        took = list[float]()
        for _ in range(5):  # in the first one ranks wait for each other
            began = yield from now()
            read_numbers((yield from all_reduce(torch.ones(1, device=device, dtype=torch.float32))))
            took.append((yield from now()) - began)
        self._latency = min(took)
        dense, _ = self._driven(self._worker.recipe, index, block, context)
        for number in due.runs:
            candidate = due.candidates[number].bound(shapes)
            run, works = partial(self._driven, candidate, index, block, context), list[float]()
            for _ in range(3):
                began = yield from now()
                bytes_, requests = yield Compute(run, LABEL, self.virtual(candidate))
                works.append((yield from now()) - began)
                self._costs[number] = CandidateCost(min(works), bytes_ / max(dense, 1), requests)
            if due.sends:
                took = yield from self._together(candidate, index, block, context)
                self._costs[number] = self._costs[number]._replace(work=took)

    def _together(self, recipe: Any, index: int, copy: Bucket, context: Context) -> Program[float]:
        """The seconds of an average by all ranks: the less of two, after one in which they wait for each other."""
        took = list[float]()
        for _ in range(3):
            began = yield from now()
            yield Compute(lambda: None, LABEL, self.virtual(recipe))
            for way, block in _runs(recipe, self._worker.buckets[index], copy):
                read_numbers(peak((yield from _averaged(way, block, context))))
            took.append((yield from now()) - began)
        return min(took[1:])

    def _driven(self, recipe: Any, index: int, copy: Bucket, context: Context) -> tuple[int, float]:
        """The bytes that a recipe sends of a block, between nodes if there are several ranks on each, and its number of requests.

        Parameters that a rule sends another way are run by themselves, as they would be in a block of their own.
        """
        worker, sent, requests = self._worker, 0, list[int]()
        for way, block in _runs(recipe, worker.buckets[index], copy):
            verbs = self._run_alone(way, block, context)
            moved = [traffic(verb, worker.rank, worker.size, worker.origin.ranks_per_node) for verb in verbs]
            sent += sum(each.sent - each.inside for each in moved)
            requests.append(len(verbs))
        return sent, sum(requests) / len(requests)

    def _run_alone(self, way: Way, block: Bucket, context: Context) -> list[Verb]:
        """Average a block as if all ranks sent the same; returns what it asked for."""
        worker, verbs = self._worker, list[Verb]()

        def answer(verb: Verb) -> Any:
            verbs.append(verb)
            return answer_with_wires(verb, place(verb, worker.rank, worker.size)[1])

        read_numbers(peak(drive(_averaged(way, block, context), answer)))
        return verbs

    # -- exchange ----------------------------------------------------------------------------------------------------

    def _exchange(self, due: TimesDue) -> Program[list[RankTimes]]:
        worker = self._worker
        own = torch.tensor(self._own(due).numbers(), dtype=torch.float64, device=worker.device)
        handle = yield from start(_gathered(own), LABEL, worker.step)
        wires = yield from join(handle)
        ranks = [wire.clone().view(torch.float64).tolist() for wire in wires]
        told = worker.replica.told(ranks, LABEL, worker.step)
        self._ready.clear()
        self._sending.clear()
        # In the order of ranks: those that hold one model together follow one another.
        return [RankTimes.of(rank, due.rows, len(due.candidates)) for each in zip(*told, strict=True) for rank in each]

    def _own(self, due: TimesDue) -> RankTimes:
        known = [moments.measured() for moments in [*self._rows][-due.rows :]]
        rows = [StepWait(NAN, NAN)] * (due.rows - len(known)) + known
        device = self._worker.device
        told = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in self._losses if x is not None]
        read = iter(read_numbers(*told))
        losses = [NAN if x is None else _finite_or_inf(next(read)) for x in self._losses]
        blocks, errors = range(len(self._worker.buckets)), self._worker.measurement.errors
        return RankTimes(
            [row.seconds for row in rows],
            [row.waited for row in rows],
            ([NAN] * due.rows + losses)[-due.rows :],
            [_median(self._ready[i]) for i in blocks],
            [_median(self._sending[i]) for i in blocks],
            [self._costs.get(i, CandidateCost()) for i in range(len(due.candidates))],
            self._latency,
            sum(errors.values()) / len(errors) if errors else NAN,
            float(crc32(platform.node().encode())),
        )


def _averaged(way: Way, block: Bucket, context: Context) -> Program[Tensor]:
    """Average a block that nobody's state is of."""
    exchange, memory = way
    states = PendingState({})

    def send(block: Bucket, context: Context) -> Program[ReduceResult]:
        return exchange.average(block, states, context)

    return (yield from memory.around(block, PendingState({}), send, context))


def _runs(recipe: Any, bucket: BucketState, copy: Bucket) -> Iterator[tuple[Way, Bucket]]:
    """Views of a copy of a bucket, one for each way that its parameters go under a recipe: as long as those, whichever numbers it
    holds.
    """
    ways, first = dict[Way, dict[str, tuple[int, ...]]](), 0
    for param, segment in zip(bucket.params, bucket.layout.segments, strict=True):
        ways.setdefault(recipe.way(segment.name, param.whole_shape), {})[segment.name] = segment.shape
    for way, shapes in ways.items():
        if len(ways) == 1:
            yield way, copy
            return
        layout = Layout.of(shapes, copy.layout.dtype)
        layout.buffers = copy.layout.buffers
        yield way, Bucket(copy.flat.narrow(0, first, layout.numel), layout)
        first += layout.numel


def _gathered(own: Tensor) -> Program[list[Tensor]]:
    return (yield AllGather(own.view(torch.uint8), agreed=True))


def _finite_or_inf(loss: float) -> float:
    """A loss that was told and is no number is infinite, so that it is not taken for one that nobody told."""
    return loss if isfinite(loss) else inf


def _seconds(since: DeviceMoment | None, until: DeviceMoment) -> float:
    """Waits until the device has come so far."""
    return NAN if since is None else until.seconds_since(since)


def _median(spans: Sequence[Span]) -> float:
    known = [value for span in spans if (value := _seconds(*span)) == value]
    return median(known) if known else NAN
