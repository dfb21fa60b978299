"""The comm thread of `quorum_rounds`: one program per round, which waits until the round closes, then averages.

Each program starts the next one, so that a rank also answers while it computes. `async_worker` says which thread writes what.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState, State
from gossamer.core.contracts import Context, ReduceResult, Sender
from gossamer.core.loop import BucketView, ErrorMeter, Loop
from gossamer.core.stream_events import StreamMark, copied_to
from gossamer.core.verbs import Handle, Program, all_reduce, now, start, take_ticket, wait_quorum
from gossamer.kernels.finite import peak
from gossamer.schedules.merging import Merge

NEVER = 1e6  # seconds that a rank waits before its first step: the other ranks close the round


class ClosingRule(NamedTuple):
    """When a round opens, when it closes, and how its contributions are merged."""

    slot: int  # steps from a rank's last round to the next round that it opens
    quorum: int
    least: int
    overlap: int
    grace: float
    keeps: bool
    weigh: Callable[[int, float], float]  # weight of steps and tokens since the last merge
    merge: Merge
    follow: Callable[[BucketView, Tensor, int, int], None]  # moves an anchor by a mean over so many of all ranks
    by_arrival: bool  # True if a rank that missed a round still answers after `slot` steps of its own


class Contribution(NamedTuple):
    """A rank's progress since its last merge, bucket by bucket, its weight, and the stream mark after which it is ready."""

    moved: list[Tensor]
    weight: float
    ready: StreamMark


@dataclass(eq=False)
class QuorumRound:
    """One round, shared by both threads; see `async_worker`."""

    number: int  # 1 at the first
    offer: Contribution | None = None
    answered: bool = False
    opened: bool = False
    closed: bool = False

    @property
    def name(self) -> str:
        """Return the name of the round's tickets."""
        return f"round/{self.number}"


class RoundResult(NamedTuple):
    """What a round's program returns: means equal on all ranks, and their peaks, not yet copied from the device.

    Behind the peaks stands the number of ranks that the means are over.
    """

    means: list[Tensor]
    largest: Tensor
    members: tuple[int, ...]
    merged: bool  # True if this rank's contribution is in the means
    follows: "PendingRound"


class PendingRound(NamedTuple):
    """A round, and the handle of the program that closes it."""

    round: QuorumRound
    handle: Handle[RoundResult]


class RoundCloser:
    """Closes rounds and averages their contributions, on one rank's comm thread."""

    def __init__(self, loop: Loop, parts: Sequence[Loop], rule: ClosingRule, lane: str) -> None:
        self._loop, self._parts, self._rule, self._lane = loop, parts, rule, lane
        self._lock = Lock()
        self.resting = False  # True while the training thread rests; then the comm thread answers
        self.pace, self._travel = NEVER, 0.0  # seconds per step of this rank, and seconds of the last round's exchange
        self.latest = QuorumRound(0)  # the round that the comm thread waits for

    def anew(self) -> "RoundCloser":
        """Return a new RoundCloser after a regroup, with the measured times of this one."""
        new = RoundCloser(self._loop, self._parts, self._rule, self._lane)
        new.pace, new._travel = self.pace, self._travel
        return new

    def wait(self, number: int) -> Program[PendingRound]:
        self.latest = round = QuorumRound(number)
        label = self._part(round).buckets[0].layout.name
        handle = yield from start(self._settle(round), label, number * self._rule.slot, self._lane)
        return PendingRound(round, handle)

    def _settle(self, round: QuorumRound) -> Program[RoundResult]:
        members = yield from self._close(round)
        offer = round.offer if self._loop.ranks.rank in members else None
        began = yield from now()
        means, largest = yield from self._average(self._part(round), offer, round.number * self._rule.slot)
        self._travel = (yield from now()) - began
        follows = yield from self.wait(round.number + 1)
        return RoundResult(means, largest, members, offer is not None, follows)

    def _close(self, round: QuorumRound) -> Program[tuple[int, ...]]:
        """Wait for the quorum, and for more ranks in the window; returns the ranks that answered, sorted."""
        size, name = self._loop.ranks.size, round.name
        quorum = min(self._rule.quorum, size)  # after a loss there may be fewer ranks than the quorum
        yield from wait_quorum(name, 1)
        round.opened = True
        began = yield from now()
        if self.resting:
            yield from self.pass_by(round)
        members = yield from wait_quorum(name, quorum)
        if self._rule.grace and quorum < size:
            window = self._window((yield from now()) - began)
            members = yield from wait_quorum(name, size, ((window, quorum),))
        round.closed = True
        return tuple(sorted(members))

    def _window(self, waited: float) -> float:
        """Return the seconds that this rank would wait for late ranks: a part `grace` of its slack."""
        slack = self._rule.overlap * self.pace - waited - self._travel
        return min(self._rule.grace * max(slack, 0.0), NEVER)

    def _average(self, part: Loop, offer: Contribution | None, step: int) -> Program[tuple[list[Tensor], Tensor]]:
        """Return the weighted mean of all contributions, through memory and exchange, and its peaks.

        Ranks without a contribution send zeros, and keep their residuals. The host never waits for the device here.
        """
        if offer is not None:
            offer.ready.precedes()  # the comm thread started earlier
        weights, lengths = yield from self._tell(part, offer)
        total, merge = weights.sum(), self._rule.merge
        share = weights[part.ranks.rank].mul(part.ranks.size).div(total)
        means, drafts, peaks = list[Tensor](), list[PendingState](), list[Tensor]()
        context = part.ranks.context(step)
        meter = None if offer is None else part.averages.error_meter(step)
        for i, bucket in enumerate(part.buckets):
            flat = bucket.empty()
            if offer is not None:
                flat = merge.given(offer.moved[i], bucket.layout).mul_(share.to(flat.dtype))
            kept = PendingState(bucket.states["memory"] if offer is not None else State())
            carried = PendingState(bucket.states["exchange"])
            block = Bucket(flat, bucket.layout)
            mean = yield from bucket.memory.around(block, kept, _through(bucket, carried, meter), context)
            means.append(merge.made(mean, bucket.layout, lengths[i].div(total)))
            peaks.append(peak(means[-1]).double().view(1))
            drafts += [kept, carried] if offer is not None else [carried]
        largest = torch.cat([*peaks, weights.count_nonzero().double().view(1)])
        for draft in drafts:
            draft.commit_if(largest.isfinite().all())
        return means, largest

    def _tell(self, part: Loop, offer: Contribution | None) -> Program[tuple[Tensor, list[Tensor]]]:
        """Exchange the weights of all ranks; returns them, and the weighted sums of the norms that the merge needs."""
        device, size = part.buckets[0].device, part.ranks.size
        mine, weight = torch.zeros(size, dtype=torch.float64), 0.0 if offer is None else offer.weight
        mine[part.ranks.rank] = weight
        moved = offer.moved if offer is not None else [bucket.empty() for bucket in part.buckets]
        lengths = [self._rule.merge.lengths(m, bucket.layout) for m, bucket in zip(moved, part.buckets)]
        summed = yield from all_reduce(torch.cat([copied_to(mine, device), *(n.mul(weight) for n in lengths)]))
        weights, *sums = summed.split([size, *(n.numel() for n in lengths)])
        return weights, sums

    def may_answer(self, round: QuorumRound) -> bool:
        """True for the first caller in a round, which then must take this rank's ticket."""
        with self._lock:
            first, round.answered = not round.answered, True
        return first

    def pass_by(self, round: QuorumRound) -> Program[None]:
        """Take this rank's ticket without a contribution, if it has not answered."""
        if self.may_answer(round):
            yield from take_ticket(round.name)

    def _part(self, round: QuorumRound) -> Loop:
        return self._parts[(round.number - 1) % len(self._parts)]


def _through(bucket: BucketView, carried: State, meter: ErrorMeter | None) -> Sender:
    """The bucket's exchange, for its memory to send through."""

    def send(block: Bucket, context: Context) -> Program[ReduceResult]:
        result = yield from bucket.exchange.average(block, carried, context)
        if meter is not None:
            meter(block, result.add_sent)
        return result

    return send
