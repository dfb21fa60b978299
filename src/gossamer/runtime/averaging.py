"""Averaging: sends a bucket's values through its memory and its exchange, and handles the mean."""

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState
from gossamer.core.contracts import ARREARS, Context, Exchange, ReduceResult
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Program, all_reduce, join, start
from gossamer.kernels.finite import peak
from gossamer.runtime import loss_scale
from gossamer.runtime.in_flight import Carried, InFlight
from gossamer.runtime.pending_commit import PendingCommit

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker


class Averaging:
    """Starts averages on the comm thread and joins them; their state changes wait in pending states."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker

    def program(self, index: int, flat: Tensor) -> tuple[Program[Carried], list[PendingState]]:
        """The program that averages one bucket's values, and the pending states to commit when all buckets have arrived.

        The mean may be written over the values.
        """
        worker, bucket = self._worker, self._worker.buckets[index]
        measures = worker.measures(worker.step)
        block = Bucket(flat, bucket.layout, None if measures else flat)
        # No average of an earlier step is in flight.
        worker.unit = loss_scale.follow(worker.buckets, worker.unit, worker.scale)
        kept, carried, found = (
            PendingState(bucket.states["memory"]),
            PendingState(bucket.states["exchange"]),
            list[Tensor](),
        )

        def send(block: Bucket, context: Context) -> Program[ReduceResult]:
            result = yield from bucket.exchange.average(block, carried, context)
            if bucket.memory.parts_models:  # the largest value must be one that all ranks have
                found.append(peak(result.mean) if result.largest is None else result.largest)
            elif bucket.memory.hands_on and result.largest is not None:
                found.append(result.largest)
            if measures:
                worker.measure(block, result.add_sent)
            return result

        average = bucket.memory.around(block, kept, send, worker.context(index))
        if ARREARS in kept:
            average = _with(average, kept, found, worker.size)
        return _carry(average, flat, found), [kept, carried]

    def launch(self, flight: InFlight, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging these values; through `over` instead of the recipe's exchange and memory, if that is given."""
        worker, bucket = self._worker, self._worker.buckets[index]
        if over is None:
            program, drafts = self.program(index, flat)
        else:
            result = over.average(Bucket(flat, bucket.layout, flat), {}, worker.context(index))
            program, drafts = _carry(_mean_of(result), flat, []), list[PendingState]()
        handle = yield from start(program, bucket.name, worker.step)
        flight.add(index, handle, drafts)

    def near(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        """Average among some ranks, without a check that the means are finite."""
        flight = InFlight()
        for index, value in zip(which, values, strict=True):
            yield from self.launch(flight, index, value, over)
        means = list[Tensor]()
        for handle in flight.handles.values():
            mean, _ = yield from join(handle)
            means.append(mean)
        return means

    def settle(self, flight: InFlight) -> Program[None]:
        """Wait for an average in flight, and commit the memories' pending states."""
        if flight.handles:
            (yield from self.arrive(flight)).commit()
            if flight.lost:
                self._worker.momenta.heal()

    def arrive(self, flight: InFlight) -> Program[PendingCommit]:
        """Wait for all means of a step. Memories may be committed only if every bucket's mean is finite, on which all ranks agree.

        They are not committed here: the means may still be dropped.
        """
        worker, peaks = self._worker, list[Tensor]()
        handles, flight.handles = flight.handles, {}
        for index, handle in handles.items():
            flight.means[index], largest = yield from join(handle)
            peaks.append(largest)
        also = [] if worker.besides is None else (yield from worker.besides([*flight.means.values()]))
        answers, worker.besides = read_numbers(*peaks, *also), None
        worker.finite, worker.told = all(map(isfinite, answers[: len(peaks)])), answers[len(peaks) :]
        if worker.finite:
            worker.row.clear()
        flight.lost = not worker.finite
        held, flight.drafts = PendingCommit(flight.drafts if worker.finite else []), []
        return held


def _carry(average: Program[Tensor], given: Tensor, found: Sequence[Tensor]) -> Program[Carried]:
    """Run an average; `given` is kept until the program is joined, since the device may read it after the comm thread is done.

    `found` is the mean's largest magnitude, if the exchange came across it.
    """
    mean = yield from average
    return mean, found[0].view(()).double() if found else peak(mean)


def _with(average: Program[Tensor], kept: PendingState, found: list[Tensor], size: int) -> Program[Tensor]:
    """Average, and add the mean of the residuals of a memory that was replaced, once and in full."""
    mean = yield from average
    total = yield from all_reduce(kept.pop(ARREARS).clone())
    found.clear()
    return mean.add_(total, alpha=1 / size)


def _mean_of(average: Program[ReduceResult]) -> Program[Tensor]:
    return (yield from average).mean
