"""Averaging: sends a bucket's values through its memory and its exchange, and handles the mean."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState
from gossamer.core.contracts import ARREARS, Context, Exchange, RankTimes, ReduceResult
from gossamer.core.errors import PeerError
from gossamer.core.stream_events import read_numbers
from gossamer.core.verbs import Among, MembersChanged, Program, all_gather, all_reduce, join, start
from gossamer.kernels.finite import all_finite, all_peaks_finite, peak
from gossamer.runtime import loss_scale
from gossamer.runtime.buckets import settle_owners
from gossamer.runtime.in_flight import Carried, InFlight, PendingCommit

if TYPE_CHECKING:
    from gossamer.runtime.worker import Worker

Besides = Callable[[list[Tensor]], Program[list[Tensor]]]


class Averaging:
    """Starts averages on the comm thread and joins them; their state changes wait in pending states."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self.unit = 1.0  # the loss scale of the memories' state
        self.means: list[Tensor] = []  # this step's agreed gradients
        self.finite = True  # false if one of them is not finite
        self.held = PendingCommit()  # this step's state changes, to commit after the optimizer step
        self.besides: Besides | None = None  # further scalars that an integration reads from the device at a step
        self.besides_values = list[float]()
        # How an integration sets the parameters' gradients to the means; this frees their own gradients' memory.
        self.hand_over: Callable[[], None] | None = None
        self._gradients = InFlight()  # this step's averages
        # If true, values given up for an average are not overwritten, so that it can run again without a lost rank.
        self.keeps = False
        # If true, averages in flight run again by themselves when the members have met, with what each rank gave.
        self.resumes = False
        # How often this rank has replaced its state, averages in flight included, by another rank's.
        self.taken = 0
        self.renews = set[int]()  # buckets whose next average is the first after a change of members
        # If true, each average ends with an all-reduce of one number: where nodes may be lost, ranks are at most one request apart.
        self.confirms = False

    # -- gradients ---------------------------------------------------------------------------------------------------

    def send_gradient(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging a bucket's gradient; the mean may be written over it."""
        worker = self._worker
        worker.controller.add_statistics(index, flat)
        given = worker.update_step.outgoing(index, flat, worker.scale) if over is None else flat
        # Weighted last: what an update sends need not grow with the gradient, such as its sign.
        yield from self._launch(self._gradients, index, self._weighted(given), over)

    def wait_gradients(self) -> Program[None]:
        """Wait for the averages of all gradients, and ask the controller."""
        worker, controller = self._worker, self._worker.controller
        sums: Sequence[Tensor] = ()
        times: Sequence[RankTimes] = ()
        if worker.size > 1 or self._gradients.handles:
            summing = yield from controller.start_sums()
            yield from controller.times.wait_begins()
            self.held = yield from self._arrive(self._gradients)
            self.means, self._gradients = [*self._gradients.means.values()], InFlight()
            worker.decay.take_out(self.means)
            sums = yield from controller.wait_sums(summing)
            times = yield from controller.times.wait_ends()
        else:
            self.means = controller.own_gradients()
            self.finite = worker.replica.all(all_finite(self.means))
        if self.finite and self.means:
            if self.hand_over is not None and "control" in worker.recipe.controller.traits:
                self.hand_over()
            state = PendingState(controller.state)
            self.held.decided = controller.decide(self.means, sums, state, times=times, words=self.held.words)
            self.held.drafts.append(state)
        elif not self.finite:
            controller.decide_without_means(times)

    # -- values that are launched and landed -------------------------------------------------------------------------

    def launch(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        """Start averaging one tensor for each of these buckets."""
        given = dict(zip(which, values, strict=True))
        flight = InFlight(step=self._worker.step, over=over, values=given if self.resumes else {})
        yield from self._begin(flight, given)
        self._worker.in_flight.add(which, flight)

    def launch_again(self) -> Program[None]:
        """Start the averages anew that a change of members broke, in the order of their first launches."""
        for flight in self._worker.in_flight.broken:
            yield from self._begin(flight, flight.values)

    def take_part_in(self, lost: Sequence[int], flights: Sequence[tuple[Sequence[int], int]]) -> None:
        """Have the same averages in flight as another rank that has described its own, with zeros as this rank's values."""
        table, buckets = self._worker.in_flight, self._worker.buckets
        table.restore(table.landing(), lost, {})
        for which, step in flights:
            values = {index: buckets[index].empty() for index in which}
            table.add(which, InFlight(step=step, values=values, broken=True))

    def _begin(self, flight: InFlight, values: Mapping[int, Tensor]) -> Program[None]:
        worker, given = self._worker, {i: self._weighted(value) for i, value in values.items()}
        flight.broken, flight.handles, flight.given = False, {}, [peak(value) for value in given.values()]
        if worker.size == 1:  # the mean over one rank, without codec or memory
            flight.means = given
            flight.lost = not worker.replica.all(all_finite([*given.values()]))
            return
        for index, value in given.items():
            yield from self._launch(flight, index, value, flight.over)

    def land(self, which: Sequence[int]) -> Program[list[Tensor] | None]:
        """Wait for the average of these buckets; None if it is not finite."""
        worker, flights, times = self._worker, self._worker.in_flight.of(which), self._worker.controller.times
        if worker.size > 1:
            yield from times.wait_begins()
        try:
            for flight in flights:
                yield from self.settle(flight)
            lost = any(flight.lost for flight in flights)
            if lost:
                yield from self._name_spoilers_of(flights)
        except MembersChanged:
            if not self.resumes:
                worker.in_flight.pop(which)
            raise
        worker.in_flight.pop(which)
        heard = (yield from times.wait_ends()) if worker.size > 1 else ()
        if lost:
            worker.record.dropped_rounds += 1
            if worker.size == 1:
                worker.optimizer_state.heal()
        landed = {i: mean for flight in flights for i, mean in flight.means.items()}
        means = None if lost or not flights else [landed[i] for i in which]
        means = worker.controller.adopt_for(means)
        if means is not None and all(flight.over is None for flight in flights):  # else they are no gradients
            loss, words = (yield from worker.controller.mean_loss()), list[str]()
            worker.controller.next = worker.controller.decide(means, loss=loss, times=heard, words=words)
            worker.controller.tell(words)
        elif lost:
            worker.controller.decide_without_means(heard)
        return means

    def local(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        """Average among some ranks, without a check that the means are finite."""
        flight = InFlight()
        for index, value in zip(which, values, strict=True):
            yield from self._launch(flight, index, value, over)
        means = list[Tensor]()
        for handle in flight.handles.values():
            mean, _ = yield from join(handle)
            means.append(mean)
        return means

    def settle(self, flight: InFlight) -> Program[None]:
        """Wait for an average in flight, and commit the memories' pending states."""
        taken = self.taken
        while flight.handles:
            try:
                held = yield from self._arrive(flight)
            except MembersChanged:
                if not self.resumes or self.taken != taken:
                    raise
                continue  # it has arrived after all, or runs again among those who are there
            held.commit()
            self.has_renewed(held)
            if flight.lost:
                self._worker.optimizer_state.heal()

    def drop(self) -> None:
        """Drop this step's gradients under way; memories stay as they were before the step."""
        self._gradients, self.means, self.held = InFlight(), [], PendingCommit()
        self.besides, self.besides_values = None, []

    def members_change(self) -> Program[None]:
        """Of averages that complete at a later step, settle those that have arrived; the others run again, or are dropped.

        An average has arrived on all ranks, or on none (`fabrics/torch/last_collective.py`).
        """
        for flight in self._worker.in_flight.averages:
            if flight.broken:
                continue
            if (yield from _has_arrived(flight)):
                yield from self.settle(flight)
            elif self.resumes:
                flight.breaks()
            else:
                self._worker.in_flight.drop(flight)
        self._worker.in_flight.posted.clear()

    def _name_spoilers_of(self, flights: Sequence[InFlight]) -> Program[None]:
        fine, taken = all_peaks_finite([value for flight in flights for value in flight.given]), self.taken
        while True:
            try:
                return (yield from self._worker.jointly(self.name_spoilers(fine)))
            except MembersChanged:
                if not self.resumes or self.taken != taken:
                    raise

    def name_spoilers(self, fine: bool, among: Among = None) -> Program[None]:
        """Count which ranks made an average non-finite. `fine`: this rank's input is finite.

        For gradients this runs among the ranks that average them together.
        """
        worker = self._worker
        flag = torch.tensor([not worker.replica.all(fine)], dtype=torch.uint8, device=worker.device)
        answers = yield from all_gather(flag, among)
        ranks = among or range(worker.size)
        guilty = [rank for rank, flag in zip(ranks, answers, strict=True) if int(flag)]
        worker.record.spoilt.update(guilty)
        worker.record.row = Counter({rank: worker.record.row[rank] + 1 for rank in guilty})

    def has_renewed(self, held: PendingCommit) -> None:
        """Note the buckets whose memories have agreed again after a change of members, once that is committed."""
        if held.drafts:
            self.renews -= held.renewed

    # -- one bucket --------------------------------------------------------------------------------------------------

    def _weighted(self, flat: Tensor) -> Tensor:
        weight = self._worker.ranks.weight
        if weight == 1:
            return flat
        return flat * weight if self.keeps else flat.mul_(weight)

    def _launch(self, flight: InFlight, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging these values; through `over` instead of the recipe's exchange and memory, if that is given."""
        worker, bucket = self._worker, self._worker.buckets[index]
        if over is None:
            program, drafts = self.program(index, flat, flight.step)
        else:
            result = over.average(Bucket(flat, bucket.layout, flat), {}, worker.context(index, flight.step))
            program, drafts = _carry(_mean_of(result), flat, []), list[PendingState]()
        program = yield from worker.controller.times.around(index, program, flat)
        flight.handles[index] = yield from start(program, bucket.name, flight.step or worker.step)
        flight.drafts += drafts
        flight.renewed |= self.renews & {index}

    def program(self, index: int, flat: Tensor, step: int = 0) -> tuple[Program[Carried], list[PendingState]]:
        """The program that averages one bucket's values, and the pending states to commit when all buckets have arrived.

        The mean may be written over the values. `step`: at which it was launched first, if that is not this one.
        """
        worker, bucket = self._worker, self._worker.buckets[index]
        meter = worker.measurement.meter(worker.step, worker.controller.times.due.measures_error)
        block = Bucket(flat, bucket.layout, flat if meter is None and not self.keeps else None)
        # No average of an earlier step is in flight.
        self.unit = loss_scale.follow(worker.buckets, self.unit, worker.scale)
        settle_owners(bucket, worker.size)
        kept, carried = PendingState(bucket.states["memory"]), PendingState(bucket.states["exchange"])
        found = list[Tensor]()

        def send(block: Bucket, context: Context) -> Program[ReduceResult]:
            result = yield from bucket.exchange.average(block, carried, context)
            if bucket.memory.parts_models:  # the largest value must be one that all ranks have
                found.append(peak(result.mean) if result.largest is None else result.largest)
            elif bucket.memory.hands_on and result.largest is not None:
                found.append(result.largest)
            if meter is not None:
                meter(block, result.add_sent)
            return result

        average = bucket.memory.around(block, kept, send, worker.context(index, step))
        if ARREARS in kept:
            average = _with_arrears(average, kept, found, worker.size)
        if index in self.renews:
            average = _after(bucket.memory.renew(kept, worker.size), average)
        return _carry(average, flat, found), [kept, carried]

    def _joined(self, flight: InFlight) -> Program[tuple[list[Tensor], list[Tensor]]]:
        """Wait for all means of a step; return the largest magnitude of each, and what an integration asked for besides."""
        peaks = list[Tensor]()
        for index, handle in flight.handles.items():
            flight.means[index], largest = yield from join(handle)
            peaks.append(largest)
        flight.handles = {}
        if self.confirms:
            yield from all_reduce(torch.ones(1, dtype=torch.float32, device=self._worker.device))
        return peaks, [] if self.besides is None else (yield from self.besides([*flight.means.values()]))

    def _arrive(self, flight: InFlight) -> Program[PendingCommit]:
        """Wait for all means of a step. Memories may be committed only if every bucket's mean is finite, on which all ranks agree.

        They are not committed here: the means may still be dropped.
        """
        try:
            peaks, also = yield from self._joined(flight)
        except MembersChanged as lost:
            self._worker.replica.outlive(lost)
            raise
        answers, self.besides = read_numbers(*peaks, *also), None
        self.finite = self._worker.replica.all(all(map(isfinite, answers[: len(peaks)])))
        self.besides_values = answers[len(peaks) :]
        if self.finite:
            self._worker.record.row.clear()
        flight.lost = not self.finite
        held, flight.drafts = PendingCommit(flight.drafts if self.finite else [], renewed=flight.renewed), []
        return held


def _carry(average: Program[Tensor], given: Tensor, found: Sequence[Tensor]) -> Program[Carried]:
    """Run an average; `given` is kept until the program is joined, since the device may read it after the comm thread is done.

    `found` is the mean's largest magnitude, if the exchange came across it.
    """
    mean = yield from average
    return mean, found[0].view(()).double() if found else peak(mean)


def _has_arrived(flight: InFlight) -> Program[bool]:
    for handle in flight.handles.values():
        if handle.failed():
            return False
        try:
            yield from join(handle)  # it needs no network any more, and at most computes
        except PeerError:
            return False
    return True


def _with_arrears(average: Program[Tensor], kept: PendingState, found: list[Tensor], size: int) -> Program[Tensor]:
    """Average, and add the mean of the residuals of a memory that was replaced, once and in full."""
    mean = yield from average
    total = yield from all_reduce(kept.pop(ARREARS).clone())
    found.clear()
    return mean.add_(total, alpha=1 / size)


def _after(first: Program[None], average: Program[Tensor]) -> Program[Tensor]:
    yield from first
    return (yield from average)


def _mean_of(average: Program[ReduceResult]) -> Program[Tensor]:
    return (yield from average).mean
