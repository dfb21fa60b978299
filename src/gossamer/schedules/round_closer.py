"""The lane of a quorum over rounds: one program a round, which waits until it closes, and averages what was offered.

Each starts its successor, so that a rank answers also while it computes. What it may touch says `learners`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, PendingState, State
from gossamer.core.contracts import Context, ReduceResult
from gossamer.core.loop import BucketView, Loop
from gossamer.core.stream_events import StreamMark, copied_to
from gossamer.core.verbs import Handle, Program, all_reduce, now, start, take_ticket, wait_quorum
from gossamer.kernels.finite import peak
from gossamer.schedules.merging import Merge
from gossamer.schedules.rounds import OuterStep

NEVER = 1e6  # seconds that a rank waits which has not taken a step yet: others will say when it is enough


class ClosingRule(NamedTuple):
    """When a round opens, when it closes, and what is made of it."""

    slot: int  # steps from a rank's last round to the next one that it opens
    quorum: int
    least: int
    overlap: int
    grace: float
    keeps: bool
    weigh: Callable[[int, float], float]  # steps, and what they count, since they were merged last
    merge: Merge
    outer: OuterStep


class Contribution(NamedTuple):
    """How far a learner has come with each block since it was merged last, what that weighs, and when its device has it."""

    moved: list[Tensor]
    weight: float
    ready: StreamMark


@dataclass(eq=False)
class QuorumRound:
    """What the head of `learners` says of it."""

    number: int  # 1 at the first
    offer: Contribution | None = None
    answered: bool = False
    opened: bool = False
    closed: bool = False

    @property
    def name(self) -> str:
        """Of its tickets."""
        return f"round/{self.number}"


class RoundResult(NamedTuple):
    """What a round's program returns: means the same on all ranks, and their peaks, which are still their device's."""

    means: list[Tensor]
    largest: Tensor
    members: tuple[int, ...]
    merged: bool  # this rank's offer is among them
    follows: "PendingRound"


class PendingRound(NamedTuple):
    """A round, and the program that settles it."""

    round: QuorumRound
    handle: Handle[RoundResult]


class RoundCloser:
    """Closes rounds, for one rank."""

    def __init__(self, loop: Loop, parts: Sequence[Loop], rule: ClosingRule, lane: str) -> None:
        self._loop, self._parts, self._rule, self._lane = loop, parts, rule, lane
        self._lock = Lock()
        self.resting = False  # the training thread does: from here come its answers
        self.pace, self._travel = NEVER, 0.0  # seconds of a step of this rank, and of the last round's exchange
        self.latest = QuorumRound(0)  # that the lane waits for

    def anew(self) -> "RoundCloser":
        """For other ranks than before, whom nothing has been told yet."""
        new = RoundCloser(self._loop, self._parts, self._rule, self._lane)
        new.pace, new._travel = self.pace, self._travel
        return new

    def wait(self, number: int) -> Program[PendingRound]:
        self.latest = round = QuorumRound(number)
        label = self._part(round).places[0].layout.name
        handle = yield from start(self._settle(round), label, number * self._rule.slot, self._lane)
        return PendingRound(round, handle)

    def _settle(self, round: QuorumRound) -> Program[RoundResult]:
        members = yield from self._close(round)
        offer = round.offer if self._loop.rank in members else None
        began = yield from now()
        means, largest = yield from self._average(self._part(round), offer, round.number * self._rule.slot)
        self._travel = (yield from now()) - began
        follows = yield from self.wait(round.number + 1)
        return RoundResult(means, largest, members, offer is not None, follows)

    def _close(self, round: QuorumRound) -> Program[tuple[int, ...]]:
        """Who has answered, in rank order: the first of them, and those who come while there is time."""
        size, name = self._loop.size, round.name
        quorum = min(self._rule.quorum, size)  # fewer may be left than were asked for
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
        """How long this rank would wait for others: a part of what is left until what it offered is to land."""
        slack = self._rule.overlap * self.pace - waited - self._travel
        return min(self._rule.grace * max(slack, 0.0), NEVER)

    def _average(self, part: Loop, offer: Contribution | None, step: int) -> Program[tuple[list[Tensor], Tensor]]:
        """The weighted mean of all offers, through memory and exchange, and its peaks; those who offer nothing send zeros, and
        keep what they owe. The host asks the device nothing here.
        """
        if offer is not None:
            offer.ready.precedes()  # this lane began long before
        weights, lengths = yield from self._tell(part, offer)
        total, merge = weights.sum(), self._rule.merge
        share = weights[part.rank].mul(part.size).div(total)
        means, drafts, peaks = list[Tensor](), list[PendingState](), list[Tensor]()
        for i, place in enumerate(part.places):
            flat = place.empty()
            if offer is not None:
                flat = merge.given(offer.moved[i], place.layout).mul_(share.to(flat.dtype))
            kept = PendingState(place.states["memory"] if offer is not None else State())
            carried = PendingState(place.states["exchange"])
            mean = yield from self._send(part, place, flat, kept, carried, step, offer is not None)
            means.append(merge.made(mean, place.layout, lengths[i].div(total)))
            peaks.append(peak(means[-1]).double().view(1))
            drafts += [kept, carried] if offer is not None else [carried]
        largest = torch.cat(peaks)
        for draft in drafts:
            draft.commit_if(largest.isfinite().all())
        return means, largest

    def _send(
        self, part: Loop, place: BucketView, flat: Tensor, kept: State, carried: State, step: int, measures: bool
    ) -> Program[Tensor]:
        def send(block: Bucket, context: Context) -> Program[ReduceResult]:
            result = yield from place.exchange.average(block, carried, context)
            if measures and part.measures(step):
                part.measure(block, result.add_sent)
            return result

        return (yield from place.memory.around(Bucket(flat, place.layout), kept, send, part.context(step)))

    def _tell(self, part: Loop, offer: Contribution | None) -> Program[tuple[Tensor, list[Tensor]]]:
        """What every rank's offer weighs, and the weighted sum of how long each tensor is, as far as the merge asks."""
        device, size = part.places[0].device, part.size
        mine, weight = torch.zeros(size, dtype=torch.float64), 0.0 if offer is None else offer.weight
        mine[part.rank] = weight
        moved = offer.moved if offer is not None else [place.empty() for place in part.places]
        lengths = [self._rule.merge.lengths(m, place.layout) for m, place in zip(moved, part.places)]
        told = yield from all_reduce(torch.cat([copied_to(mine, device), *(n.mul(weight) for n in lengths)]))
        weights, *found = told.split([size, *(n.numel() for n in lengths)])
        return weights, found

    def may_answer(self, round: QuorumRound) -> bool:
        """Whether the right to draw this rank's ticket is the caller's."""
        with self._lock:
            first, round.answered = not round.answered, True
        return first

    def pass_by(self, round: QuorumRound) -> Program[None]:
        """Answer that this rank has nothing to offer, if it has not answered."""
        if self.may_answer(round):
            yield from take_ticket(round.name)

    def _part(self, round: QuorumRound) -> Loop:
        return self._parts[(round.number - 1) % len(self._parts)]
