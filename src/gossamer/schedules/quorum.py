"""The quorum of backup workers, seen from one rank: a lane that is always there, and a thread of training that may be late.

Every step has a round of its own, and who may touch what of it is settled here. The training thread writes `offer` before it
claims a ticket; the lane reads it after that ticket was counted, and never else. The lane writes `wait_quorum`, once, when enough
tickets are drawn; the training thread only asks whether it is set, and both answers are right. All else comes to the training
thread as the result of the lane's program, the next round included, so joining its handle is what orders the two.
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

SEEN = 200  # arrivals that the deadline goes by
FEW = 20  # before so many there is none: two ranks that happen to come together say nothing of the others
KEPT = 1000  # steps of which it is remembered who was accepted


class GradientContribution(NamedTuple):
    """A rank's gradient of one step, the moment its device has it, and the rates it would be applied with."""

    gradient: Tensor
    rates: Tensor
    ready: StreamMark


class StepOutcome(NamedTuple):
    """What a step came to: the same on all ranks."""

    mean: Tensor
    rates: list[float]
    fine: bool  # else nobody applies it
    accepted: tuple[int, ...]  # whose gradients it is made of

    @property
    def missed(self) -> LateUpdate:
        """It, for a rank that is late."""
        return LateUpdate(self.mean if self.fine else None, self.rates)


@dataclass(eq=False)
class QuorumStep:
    """One step: what the head of this file says of it."""

    step: int
    offer: GradientContribution | None = None
    closed: bool = False


class StepResult(NamedTuple):
    """What a round's program returns: the numbers in `told`, the rates and the mean's peak, are still their device's."""

    mean: Tensor
    accepted: tuple[int, ...]
    told: Tensor
    follows: "PendingStep"


class PendingStep(NamedTuple):
    """A round, and the program that settles it."""

    round: QuorumStep
    handle: Handle[StepResult]


class QuorumDeadline(NamedTuple):
    """How long a step is kept open: for all until a deadline, then for as many as are `wanted`, and for fewer after `limit`.

    The deadline is the median of arrivals and `grace` times their median distance from it; without grace there is none, and
    without a limit no end.
    """

    wanted: int
    grace: float = 0.0
    limit: float = 0.0

    def fallback(self, arrivals: Sequence[float]) -> tuple[tuple[float, int], ...]:
        last = ((self.limit, 1),) if self.limit else ()
        if not self.grace or len(arrivals) < FEW:  # of the first steps too little is known
            return last
        middle = median(arrivals)
        spread = median([abs(t - middle) for t in arrivals])
        return ((middle + self.grace * spread, self.wanted), *last)


class Quorum:
    """Keeps one program per step waiting on the lane; each starts its successor, so that late ranks still answer."""

    def __init__(self, loop: Loop, patience: QuorumDeadline, shrinks: bool, lane: str) -> None:
        self.loop, self.patience, self.shrinks, self.lane = loop, patience, shrinks, lane
        self._arrivals = deque[float](maxlen=SEEN)  # seconds from the beginning of a step, as this lane saw them
        self.accepted = dict[int, tuple[int, ...]]()  # by step
        self._now: PendingStep | None = None  # the round of the step that this rank computes

    def open(self) -> Program[None]:
        """Start waiting for the step that is being computed."""
        self._now = yield from self._wait(QuorumStep(self.loop.step))

    def offer(self, flat: Tensor) -> Program[None]:
        """My gradient for the step I computed is ready: put it where the lane finds it, then claim a ticket.

        Not before the device has it: who is first is for the devices to say, not for hosts that run ahead of them.
        """
        round = self._waiting.round
        rates = torch.tensor(self.loop.rates, dtype=torch.float64)
        round.offer = GradientContribution(flat, rates, ready := StreamMark(flat.device))
        if not round.closed:  # else it comes too late, and need not ask
            ready.wait()
            yield from take_ticket(f"step/{round.step}")

    def take(self) -> Program[StepOutcome]:
        """The agreed update of the step that this rank computes; the next one's round begins."""
        round, handle = self._waiting
        settled = yield from join(handle)
        self._now = settled.follows
        *rates, largest = read_numbers(settled.told)
        self.accepted[round.step] = settled.accepted
        self.accepted.pop(round.step - KEPT, None)
        self.loop.accept(settled.accepted)
        return StepOutcome(settled.mean, rates, isfinite(largest), settled.accepted)

    def is_late(self) -> bool:
        """Whether the next step has closed already, without this rank."""
        return self._waiting.round.closed

    # -- on the lane -------------------------------------------------------------------------------------------------

    def _wait(self, round: QuorumStep) -> Program[PendingStep]:
        handle = yield from start(self._settle(round), self.loop.places[0].layout.name, round.step, self.lane)
        return PendingStep(round, handle)

    def _settle(self, round: QuorumStep) -> Program[StepResult]:
        """Settle a step; besides, all that the host will ask about it in one tensor: the rates, and the mean's peak."""
        loop, (place,) = self.loop, self.loop.places
        carried, context, measures = (
            PendingState(place.states["exchange"]),
            loop.context(round.step),
            loop.measures(round.step),
        )
        accepted = yield from self._wait_for_enough(round.step)
        round.closed = True
        block, numbers = self._given(round, accepted)
        result = yield from place.exchange.average(block, carried, context)
        # The fastest rank speaks for all: one learning rate for one update, although a late rank's scheduler lags.
        rates = yield from all_reduce(numbers.clone() if loop.rank == accepted[0] else torch.zeros_like(numbers))
        mean = result.mean if len(accepted) == loop.size else result.mean.mul_(loop.size / len(accepted))
        if measures and round.offer is not None and loop.rank in accepted:
            loop.measure(Bucket(round.offer.gradient, place.layout), result.add_sent)
        largest = peak(mean)
        carried.commit_if(largest.isfinite())
        follows = yield from self._wait(QuorumStep(round.step + 1))
        return StepResult(mean, accepted, torch.cat([rates, largest.view(1)]), follows)

    def _wait_for_enough(self, step: int) -> Program[tuple[int, ...]]:
        patience, size = self.patience, self.loop.size
        count = size if patience.grace else patience.wanted
        accepted = yield from wait_quorum(f"step/{step}", count, patience.fallback(self._arrivals))
        self._arrivals.extend(accepted.seconds)
        if len(accepted) < patience.wanted and not self.shrinks:
            missing = sorted(set(range(size)) - set(accepted))
            raise PeerError(
                f"step {step}: only {len(accepted)} of {patience.wanted} gradients came within {patience.limit:g} seconds, none from "
                f"ranks {missing}; give the step more time (limit), allow more backups, or on_exhausted='shrink'"
            )
        return tuple(accepted)

    def _given(self, round: QuorumStep, accepted: tuple[int, ...]) -> tuple[Bucket, Tensor]:
        """What this rank gives to a mean that some were accepted for, and the rates it would be applied with."""
        (place,) = self.loop.places
        mine = round.offer if self.loop.rank in accepted else None
        if mine is None:
            nothing = place.empty()
            return Bucket(nothing, place.layout), nothing.new_zeros(len(self.loop.rates), dtype=torch.float64)
        mine.ready.precedes()  # this lane began long before
        return Bucket(mine.gradient, place.layout), copied_to(mine.rates, mine.gradient.device)

    @property
    def _waiting(self) -> PendingStep:
        assert self._now is not None, "the quorum was never opened"
        return self._now
