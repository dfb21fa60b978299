"""A learner of rounds that close without the latest: a lane that is always there, and a thread of training at its own pace.

Who may touch what: the training thread alone writes parameters, the schedule's states and a `PendingFragment`. Of a `QuorumRound` it writes
`offer`, before it claims a ticket; the lane reads that once enough tickets are drawn, and never else. The lane writes `opened`
and `closed`, each once; the training thread only asks, and both answers are right. Whoever draws this rank's ticket, the
training thread or, while that rests, the lane, first wins the right to (`RoundCloser.may_answer`), so that there is one.

Where a rank is lost, or comes back, all that is under way fails, on every rank. Then whoever trains meets the others anew, once
its step is done, and the round that was open runs again with what was offered for it (`outlive`).
"""

from collections.abc import Callable, Sequence
from math import isfinite

from torch import Tensor

from gossamer.core.errors import PeerError
from gossamer.core.loop import Loop
from gossamer.core.stream_events import StreamMark, read_numbers
from gossamer.core.verbs import Program, join, now, regroup, take_ticket
from gossamer.kernels.finite import all_finite
from gossamer.schedules import recovery
from gossamer.schedules.pending_fragments import PendingFragment, WorkerProgress, restored
from gossamer.schedules.round_closer import ClosingRule, Contribution, PendingRound, QuorumRound, RoundCloser


class AsyncWorker:
    """The training thread's side: it counts steps, answers, and lands what the lane has closed."""

    def __init__(self, loop: Loop, parts: Sequence[Loop], rule: ClosingRule, lane: str) -> None:
        self._loop, self._parts, self._rule = loop, parts, rule
        self._fragments = [PendingFragment(part) for part in parts]
        self._closing = RoundCloser(loop, parts, rule, lane)
        self._steps = 0  # of this rank, since it began
        # The round that comes next; steps since it last answered or landed; the step at which what it answered lands.
        self._number, self._since, self._due = restored(
            self._fragments, WorkerProgress(1, (loop.step - 1) % rule.slot, None)
        )
        self._sent: tuple[int, float] | None = None  # steps and tokens of what it answered, until that is settled
        self._timed: tuple[float, int] = (0.0, 0)  # when computing began, and after which step
        self._merged: tuple[int, ...] = ()  # who was a part of the last one, by rank
        self._now: PendingRound | None = None

    # -- the training thread -------------------------------------------------------------------------------------------

    def open(self) -> Program[None]:
        """Start waiting for the first round; or for the one that the others wait for."""
        self._timed = (yield from now()), self._steps
        if self._loop.present.joins:
            self._number = 0
            yield from self.surviving(self._meet_the_others)
        else:
            self._now = yield from self._closing.wait(self._number)

    def step_is_done(self) -> Program[None]:
        """Count it; land what is due, and answer if a round is open, or open one."""
        self._steps += 1
        self._since += 1
        for fragment in self._fragments:
            fragment.steps += 1
            fragment.tokens += self._loop.weight
        began, before = self._timed
        self._closing.pace = ((yield from now()) - began) / (self._steps - before)
        yield from self.surviving(self._land_and_answer)

    def _land_and_answer(self) -> Program[None]:
        if self._waiting.handle.failed():
            yield from join(self._waiting.handle)
        yield from self._land_if_due()
        while self._due is None and self._is_to_be_taken():
            yield from self._take()
            yield from self._land_if_due()
        if self._due is None and self._is_asked():
            yield from self._answer()
            yield from self._land_if_due()

    def rest(self) -> Program[None]:
        """Wait for nobody, and let nobody wait: answer what is open, and leave it to the lane to answer from now on."""
        self._closing.resting = True
        latest = self._closing.latest
        if latest.opened and not latest.closed:
            if latest is self._waiting.round and self._due is None:
                yield from self._answer()
            yield from self._closing.pass_by(latest)

    def settle(self, said: int) -> Program[None]:
        """All ranks rest: take what has closed, and what is open. Nothing lands, for now is not the time to write parameters.

        `said` is the largest of what ranks `say`.
        """
        number, opened = divmod(said, 2)
        while self._waiting.round.number < number:
            yield from self._take()
        if opened and self._waiting.round.number == number:
            if self._due is None and not self._waiting.round.closed:
                yield from self._answer()
            yield from self._closing.pass_by(self._waiting.round)
            yield from self._take()
        self._closing.resting = False
        self.keep()

    def say(self) -> int:
        """Where this rank is: at a round that nobody has opened as far as it knows, or at one that it has answered."""
        return 2 * self._waiting.round.number + (self._sent is not None)

    def take_over(self) -> Program[None]:
        """What has been settled, where the fabric is over that it was settled on."""
        while self._waiting.handle.done():
            yield from self._take()
        self.keep()

    def _is_to_be_taken(self) -> bool:
        """Whether a round that closed without this rank is through, or has been under way for too long: an average that never
        comes, for the others stand still, would let this rank train on alone. Who waits for it learns why.
        """
        round, handle = self._waiting
        return round.closed and (handle.done() or self._since >= 2 * self._rule.slot)

    def _is_asked(self) -> bool:
        """Whether it is time for a round, or somebody else has found so."""
        round = self._waiting.round
        if self._since >= self._rule.slot:
            return not round.closed
        return round.opened and not round.closed and self._fragment(round.number).steps >= self._rule.least

    def _answer(self) -> Program[None]:
        """Offer how far this rank has come, and claim a ticket."""
        round = self._waiting.round
        fragment = self._fragment(round.number)
        held = fragment.loop.parameters()
        # Which is known when the device has come so far: it is for devices to say who is first.
        if not all_finite(held):
            fragment.forget()
            self._since, self._due = 0, self._steps
            self._loop.give_up()
            self._loop.report_finite(None, False)
            return
        if not self._closing.may_answer(round):
            return
        for state, x in zip(fragment.loop.states if fragment.steps else [], held):
            state["start"] = x  # until it lands
        self._since, self._due = 0, self._steps + self._rule.overlap
        self._sent = fragment.steps, fragment.tokens
        yield from self._offer(round)

    def _offer(self, round: QuorumRound) -> Program[None]:
        """How far a fragment had moved away from the anchor when this rank answered."""
        if self._sent is not None and self._sent[0]:
            moved = self._fragment(round.number).moved()
            round.offer = Contribution(moved, self._rule.weigh(*self._sent), StreamMark(moved[0].device))
        yield from take_ticket(round.name)

    def _land_if_due(self) -> Program[None]:
        if self._due is None or self._steps < self._due:
            return
        if self._sent is not None:
            yield from self._take()
        for fragment in self._fragments:
            fragment.write()
        self._due = None
        self._timed = (yield from now()), self._steps  # what was waited for is no computing

    def _take(self) -> Program[None]:
        """Learn what a round came to, and move the anchor with it; the model lands on it when that is due."""
        round, handle = self._waiting
        settled = yield from join(handle)
        self._now, self._number = settled.follows, settled.follows.round.number
        fragment = self._fragment(round.number)
        before, fine = [s["anchor"] for s in fragment.loop.states], all(map(isfinite, read_numbers(settled.largest)))
        for place, mean in zip(fragment.loop.places, settled.means if fine else []):
            self._rule.outer.take(place, mean, 1.0)
        self._merged = tuple(self._loop.present.ranks[i] for i in settled.members)
        if fine:
            self._loop.accept(self._merged)
        self._is_over(fragment, settled.merged, fine, before)

    def _is_over(self, fragment: PendingFragment, merged: bool, fine: bool, before: Sequence[Tensor]) -> None:
        """A round is; `merged` says whether this rank was a part of it."""
        sent, self._sent = self._sent, None
        if merged and not fine:
            fragment.forget()
            self._loop.give_up()
        elif merged and sent is not None:
            fragment.is_merged(*sent)
        elif fine:
            fragment.is_late(self._rule.keeps, before)
        if self._due is None:
            self._since, self._due = 0, self._steps

    # -- when a rank is lost, or comes back ------------------------------------------------------------------------------

    def surviving(self, act: Callable[[], Program[None]]) -> Program[None]:
        """Do it, and again each time that it fails because others than before are there."""
        while True:
            try:
                return (yield from act())
            except PeerError as failure:
                yield from self.outlive(failure)

    def outlive(self, failure: Exception) -> Program[None]:
        """Go on with those who are there; raises the failure where that is no help."""
        while self._now is not None and self._now.handle.done() and not self._now.handle.failed():
            yield from self._take()
        while True:
            present, life = (yield from regroup(failure)), self._loop.present.life
            self._loop.regroup(present)
            if present.life != life:  # it stood still for so long that it was taken for dead
                self._number = 0
            try:
                return (yield from self._meet_the_others())
            except PeerError as again:
                failure = again

    def _meet_the_others(self) -> Program[None]:
        """All are at one round then; what was open is open again, with what was offered for it."""
        latest = yield from recovery.agree(self._parts, self._number, self._loop.step, self._merged)
        if not latest.round:
            raise PeerError("nobody is left of those who were at work, and none of us knows the model; start all anew")
        if self._number < latest.round:
            self._catch_up(latest)
        rests, self._closing = self._closing.resting, self._closing.anew()
        self._now = waiting = yield from self._closing.wait(self._number)
        if self._sent is not None and self._closing.may_answer(waiting.round):
            yield from self._offer(waiting.round)
        if rests:
            yield from self.rest()
        self._timed = (yield from now()), self._steps

    def _catch_up(self, latest: recovery.FurthestProgress) -> None:
        """The others are ahead: by a round that this rank took part in, or it has just come, and nothing of its own counts."""
        comes, self._merged = not self._number, latest.members
        fragment = self._fragment(self._number or latest.round)
        before = [s["anchor"] for s in fragment.loop.states]
        for place, state in zip((p for part in self._parts for p in part.places), latest.states):
            place.states["schedule"].update(state)
        self._number = latest.round
        if comes:
            for each in self._fragments:
                each.forget()
                each.write()
            self._since, self._due, self._sent = 0, None, None
            self._loop.catch_up(latest.step)
        else:
            merged = self._sent is not None and self._loop.present.ranks[self._loop.rank] in self._merged
            self._is_over(fragment, merged, True, before)

    # -- what is kept --------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Put what a checkpoint must hold where it is found."""
        due = None if self._due is None else max(self._due - self._steps, 0)
        for fragment in self._fragments:
            fragment.keep(WorkerProgress(self._number, self._since, due))

    def _fragment(self, number: int) -> PendingFragment:
        """Which one a round is of."""
        return self._fragments[(number - 1) % len(self._fragments)]

    @property
    def _waiting(self) -> PendingRound:
        assert self._now is not None, "the learner was never opened"
        return self._now
