"""The quorum of backup workers on one rank: a comm thread that closes steps, and a training thread that may be late.

Which thread writes what: every step has a `QuorumStep`. The training thread writes `offer` before it takes a ticket; the comm
thread reads it only after that ticket was counted. The comm thread writes `closed`, once, when enough tickets are taken; the
training thread reads it, and works correctly with the old value too. The training thread gets all else, also the next step, as
the result of the comm thread's program: joining its handle orders the two threads.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState
from gossamer.core.errors import PeerError
from gossamer.core.loop import Loop
from gossamer.core.stream_events import StreamMark, copied_to, read_numbers
from gossamer.core.verbs import Handle, LateUpdate, Program, all_reduce, join, start, take_ticket, wait_quorum
from gossamer.kernels.finite import peak

SEEN = 200  # latest arrivals from which the deadline is computed
FEW = 20  # arrivals needed for a deadline: two ranks that arrive together say nothing about the others
KEPT = 1000  # steps for which the accepted ranks are kept


class GradientContribution(NamedTuple):
    """A rank's gradient of one step, its learning rates, and the stream mark after which the gradient is ready."""

    gradient: Tensor
    rates: Tensor
    ready: StreamMark


class StepOutcome(NamedTuple):
    """The result of a step, equal on all ranks."""

    mean: Tensor
    rates: list[float]
    fine: bool  # if False, no rank applies the mean
    accepted: tuple[int, ...]  # ranks whose gradients are in the mean

    @property
    def missed(self) -> LateUpdate:
        """Return the update of this step for a late rank."""
        return LateUpdate(self.mean if self.fine else None, self.rates)


@dataclass(eq=False)
class QuorumStep:
    """One step of the quorum, shared by both threads; see the module's docstring."""

    step: int
    offer: GradientContribution | None = None
    closed: bool = False


class StepResult(NamedTuple):
    """What a step's program returns; `told` holds the rates and the mean's peak, not yet copied from the device."""

    mean: Tensor
    accepted: tuple[int, ...]
    told: Tensor
    follows: "PendingStep"


class PendingStep(NamedTuple):
    """A step, and the handle of the program that closes it."""

    round: QuorumStep
    handle: Handle[StepResult]


class QuorumDeadline(NamedTuple):
    """How long a step is kept open: for all ranks until a deadline, then for `wanted` ranks, and for fewer after `limit`.

    The deadline is the median of arrival times plus `grace` times their median distance from it. With a `grace` of 0 there is
    no deadline, with a `limit` of 0 no limit.
    """

    wanted: int
    grace: float = 0.0
    limit: float = 0.0

    def fallback(self, arrivals: Sequence[float]) -> tuple[tuple[float, int], ...]:
        last = ((self.limit, 1),) if self.limit else ()
        if not self.grace or len(arrivals) < FEW:  # too few arrivals so far
            return last
        middle = median(arrivals)
        spread = median([abs(t - middle) for t in arrivals])
        return ((middle + self.grace * spread, self.wanted), *last)


class Quorum:
    """Runs one program per step on the comm thread; each starts the next one, so that late ranks still take part."""

    def __init__(self, loop: Loop, patience: QuorumDeadline, shrinks: bool, lane: str) -> None:
        self.loop, self.patience, self.shrinks, self.lane = loop, patience, shrinks, lane
        self._arrivals = deque[float](maxlen=SEEN)  # seconds from the beginning of a step, as this comm thread saw them
        self.accepted = dict[int, tuple[int, ...]]()  # by step
        self._now: PendingStep | None = None  # the round of the step that this rank computes

    def open(self) -> Program[None]:
        """Start waiting for the step that is being computed."""
        self._now = yield from self._wait(QuorumStep(self.loop.step))

    def offer(self, flat: Tensor) -> Program[None]:
        """Offer this rank's gradient to the comm thread, then take a ticket for its step.

        This waits for the device: the order of ranks is that of their devices, not of hosts that run ahead of them.
        """
        round = self._waiting.round
        rates = torch.tensor(self.loop.optimizer.rates, dtype=torch.float64)
        round.offer = GradientContribution(flat, rates, ready := StreamMark(flat.device))
        if not round.closed:  # if closed, the gradient is too late for a ticket
            ready.wait()
            yield from take_ticket(f"step/{round.step}")

    def take(self) -> Program[StepOutcome]:
        """Wait for the update of this rank's step, and move on to the next step."""
        round, handle = self._waiting
        settled = yield from join(handle)
        self._now = settled.follows
        *rates, largest = read_numbers(settled.told)
        self.accepted[round.step] = settled.accepted
        self.accepted.pop(round.step - KEPT, None)
        self.loop.record.closed(settled.accepted)
        return StepOutcome(settled.mean, rates, isfinite(largest), settled.accepted)

    def is_late(self) -> bool:
        """True if the next step has closed already, without this rank."""
        return self._waiting.round.closed

    # -- on the comm thread ------------------------------------------------------------------------------------------

    def _wait(self, round: QuorumStep) -> Program[PendingStep]:
        handle = yield from start(self._settle(round), self.loop.buckets[0].layout.name, round.step, self.lane)
        return PendingStep(round, handle)

    def _settle(self, round: QuorumStep) -> Program[StepResult]:
        """Close a step and average its gradients; `told` has all numbers that the host reads, in one tensor."""
        loop, (bucket,) = self.loop, self.loop.buckets
        carried, context = PendingState(bucket.states["exchange"]), loop.ranks.context(round.step)
        meter = loop.averages.error_meter(round.step)
        accepted = yield from self._wait_for_enough(round.step)
        round.closed = True
        block, numbers = self._given(round, accepted)
        result = yield from bucket.exchange.average(block, carried, context)
        # All use the learning rates of the first accepted rank, because the schedulers of late ranks lag.
        rates = yield from all_reduce(numbers.clone() if loop.ranks.rank == accepted[0] else torch.zeros_like(numbers))
        mean = result.mean if len(accepted) == loop.ranks.size else result.mean.mul_(loop.ranks.size / len(accepted))
        if meter is not None and round.offer is not None and loop.ranks.rank in accepted:
            meter(Bucket(round.offer.gradient, bucket.layout), result.add_sent)
        largest = peak(mean)
        carried.commit_if(largest.isfinite())
        follows = yield from self._wait(QuorumStep(round.step + 1))
        return StepResult(mean, accepted, torch.cat([rates, largest.view(1)]), follows)

    def _wait_for_enough(self, step: int) -> Program[tuple[int, ...]]:
        patience, size = self.patience, self.loop.ranks.size
        count = size if patience.grace else patience.wanted
        accepted = yield from wait_quorum(f"step/{step}", count, patience.fallback(self._arrivals))
        self._arrivals.extend(accepted.seconds)
        if len(accepted) < patience.wanted and not self.shrinks:
            missing = sorted(set(range(size)) - set(accepted))
            raise PeerError(
                f"step {step}: only {len(accepted)} of {patience.wanted} gradients came within {patience.limit:g} seconds, none from "
                f"ranks {missing}; increase limit or backups, or use on_exhausted='shrink'"
            )
        return tuple(accepted)

    def _given(self, round: QuorumStep, accepted: tuple[int, ...]) -> tuple[Bucket, Tensor]:
        """Return this rank's input to the mean, and its rates: zeros if this rank was not accepted."""
        (bucket,) = self.loop.buckets
        mine = round.offer if self.loop.ranks.rank in accepted else None
        if mine is None:
            nothing = bucket.empty()
            return Bucket(nothing, bucket.layout), nothing.new_zeros(
                len(self.loop.optimizer.rates), dtype=torch.float64
            )
        mine.ready.precedes()  # the comm thread started earlier
        return Bucket(mine.gradient, bucket.layout), copied_to(mine.rates, mine.gradient.device)

    @property
    def _waiting(self) -> PendingStep:
        assert self._now is not None, "open() was not called"
        return self._now
