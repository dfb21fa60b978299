"""One rank of `quorum_rounds`: a training thread with steps of its own, and a comm thread that closes rounds.

Which thread writes what: only the training thread writes parameters, the schedule's states and a `PendingFragment`. It writes
`QuorumRound.offer` before it takes a ticket; the comm thread reads `offer` only after enough tickets are taken. The comm thread
writes `opened` and `closed`, each once; the training thread reads them, and works correctly with the old value too. This rank
takes one ticket per round: the thread that takes it (the training thread, or the comm thread while training rests) must first
get True from `RoundCloser.may_answer`.

When a rank is lost or comes back, all pending work fails on every rank. After its current step the training thread regroups
with the other ranks, and the open round runs again with the same contributions (`outlive`).
"""

from collections.abc import Callable, Sequence
from math import isfinite

from torch import Tensor

from gossamer.core.errors import PeerError
from gossamer.core.loop import Loop
from gossamer.core.stream_events import StreamMark, read_numbers
from gossamer.core.verbs import MembersLeave, Program, join, now, regroup, take_ticket
from gossamer.kernels.finite import all_finite
from gossamer.schedules import recovery
from gossamer.schedules.handing_over import HandingOver
from gossamer.schedules.pending_fragments import PendingFragment, WorkerProgress, restored
from gossamer.schedules.round_closer import ClosingRule, Contribution, PendingRound, QuorumRound, RoundCloser


class AsyncWorker:
    """The training thread's side: counts steps, answers rounds, and applies the rounds that the comm thread has closed."""

    def __init__(self, loop: Loop, parts: Sequence[Loop], rule: ClosingRule, lane: str) -> None:
        self._loop, self._parts, self._rule = loop, parts, rule
        self._fragments = [PendingFragment(part) for part in parts]
        self._closing = RoundCloser(loop, parts, rule, lane)
        self._steps = 0  # of this rank, since it started
        # The next round; steps since the last answer or write; the step at which the answered round is written.
        self._number, self._since, self._due = restored(
            self._fragments, WorkerProgress(1, (loop.step - 1) % rule.slot, None)
        )
        self._sent: tuple[int, float] | None = None  # steps and tokens of the last answer, until its round is settled
        self._timed: tuple[float, int] = (0.0, 0)  # time at which computing began, and the step before it
        self._merged: tuple[int, ...] = ()  # ranks merged in the last round
        self._now: PendingRound | None = None
        self._handing_over = HandingOver(loop)
        self.has_left = False  # True once the others go on without this rank

    # -- the training thread -------------------------------------------------------------------------------------------

    def open(self) -> Program[None]:
        """Start waiting for the first round, or, in a rank that joins, for the round of the others."""
        self._timed = (yield from now()), self._steps
        if self._loop.ranks.present.joins:
            self._number = 0
            try:
                yield from self._meet_the_others()
            except PeerError as failure:
                yield from self.outlive(failure)  # which meets them; once more, this rank would wait for them alone
        else:
            self._now = yield from self._closing.wait(self._number)

    def step_is_done(self) -> Program[None]:
        """Count a step, write a due round to the model, then answer the open round or open one."""
        self._steps += 1
        self._since += 1
        for fragment in self._fragments:
            fragment.steps += 1
            fragment.tokens += self._loop.ranks.weight
        if self._loop.buckets[0].device.type != "cuda":
            yield from self._note_pace()
        yield from self.surviving(self._land_and_answer)

    def _note_pace(self) -> Program[None]:
        """Note the seconds of a step. A GPU works behind the host: there it is noted where the host has waited for it."""
        began, before = self._timed
        if self._steps > before:
            self._closing.pace = ((yield from now()) - began) / (self._steps - before)

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
        """Answer the open round, then let the comm thread answer while the training thread rests."""
        self._closing.resting = True
        latest = self._closing.latest
        if latest.opened and not latest.closed:
            if latest is self._waiting.round and self._due is None:
                yield from self._answer()
            yield from self._closing.pass_by(latest)

    def goes_on(self) -> None:
        """Let the training thread answer again: it begins a step."""
        self._closing.resting = False

    def settle(self, said: int) -> Program[None]:
        """Take the closed rounds and the open one, while all ranks rest. Writes no parameters.

        `said` is the maximum of `say()` over all ranks.
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

    def landed(self) -> list[Tensor]:
        """The model as it is once the rounds that are settled are written: while this rank rested there may have been many."""
        values = {id(b): value for f in self._fragments for b, value in zip(f.loop.buckets, f.landed())}
        return [values[id(bucket)] for bucket in self._loop.buckets]

    def say(self) -> int:
        """Return twice the number of this rank's round, plus 1 if this rank has answered it."""
        return 2 * self._waiting.round.number + (self._sent is not None)

    def take_over(self) -> Program[None]:
        """Take the rounds that were settled on a fabric that is closed now."""
        while self._waiting.handle.done():
            yield from self._take()
        self.keep()

    def _is_to_be_taken(self) -> bool:
        """True if a round that closed without this rank is settled, or should be waited for.

        After two slots this rank waits: if the other ranks are stuck, the wait raises an error that says why. Else this rank
        would train on alone.
        """
        round, handle = self._waiting
        return round.closed and (handle.done() or self._since >= 2 * self._rule.slot)

    def _is_asked(self) -> bool:
        """True if this rank should answer: its slot is over, or another rank has opened the round."""
        round = self._waiting.round
        if self._since >= self._rule.slot:
            return not round.closed
        return round.opened and not round.closed and self._fragment(round.number).steps >= self._rule.least

    def _answer(self) -> Program[None]:
        """Offer this rank's progress, and take a ticket."""
        round = self._waiting.round
        fragment = self._fragment(round.number)
        held = fragment.loop.parameters()
        # This waits for the device: the order of ranks is that of their devices, not of their hosts.
        if not all_finite(held):
            fragment.forget()
            self._since, self._due = 0, self._steps
            self._loop.record.round_dropped()
            self._loop.record.finite(None, False)
            return
        if held[0].device.type == "cuda":
            yield from self._note_pace()
        if not self._closing.may_answer(round):
            return
        for state, x in zip(fragment.loop.states if fragment.steps else [], held):
            state["start"] = x  # until the round is written
        self._since, self._due = 0, self._steps + self._rule.overlap
        self._sent = fragment.steps, fragment.tokens
        yield from self._offer(round)

    def _offer(self, round: QuorumRound) -> Program[None]:
        """Offer the fragment's move away from the anchor, as of this rank's answer, and take a ticket."""
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
        self._timed = (yield from now()), self._steps  # waiting is not computing

    def _take(self) -> Program[None]:
        """Wait for a round's result and move the anchor; the model follows when the round is due."""
        round, handle = self._waiting
        settled = yield from join(handle)
        self._now, self._number = settled.follows, settled.follows.round.number
        fragment = self._fragment(round.number)
        *peaks, arrivals = read_numbers(settled.largest)
        before, fine = [s["anchor"] for s in fragment.loop.states], all(map(isfinite, peaks))
        for bucket, mean in zip(fragment.loop.buckets, settled.means if fine else []):
            self._rule.follow(bucket, mean, int(arrivals), self._loop.ranks.size)
        self._merged = tuple(self._loop.ranks.present.ranks[i] for i in settled.members)
        if fine:
            self._loop.record.closed(self._merged)
        self._is_over(fragment, settled.merged, fine, before)

    def _is_over(self, fragment: PendingFragment, merged: bool, fine: bool, before: Sequence[Tensor]) -> None:
        """Update the fragment and the counters after a round; `merged` is True if this rank was part of it."""
        sent, self._sent = self._sent, None
        if merged and not fine:
            fragment.forget()
            self._loop.record.round_dropped()
        elif merged and sent is not None:
            fragment.is_merged(*sent)
        elif fine:
            fragment.is_late(self._rule.keeps, before)
        if self._due is None:
            self._since, self._due = 0, self._steps
        if self._rule.by_arrival:
            self._since = fragment.steps

    # -- leave in good order ---------------------------------------------------------------------------------------------

    def depart(self) -> Program[None]:
        """Have all steps of this rank merged, and hand what it still owes to the others, who then go on without it."""
        yield from self.surviving(self._merge_all)
        self._handing_over.leaves = True
        yield from self.outlive(MembersLeave(f"rank {self._loop.ranks.present.ranks[self._loop.ranks.rank]} leaves"))

    def _merge_all(self) -> Program[None]:
        """Answer round after round, until each fragment's steps are part of the anchor."""
        while self._due is not None or any(fragment.steps for fragment in self._fragments):
            round = self._waiting.round
            if self._due is None and not round.closed:
                yield from self._answer()
            if self._sent is not None or round.closed:
                yield from self._take()
            for fragment in self._fragments:
                fragment.write()
            self._due = None

    # -- a rank is lost, or comes back -----------------------------------------------------------------------------------

    def surviving(self, act: Callable[[], Program[None]]) -> Program[None]:
        """Run `act`, and again after each failure that comes from lost or new ranks."""
        while True:
            try:
                return (yield from act())
            except PeerError as failure:
                yield from self.outlive(failure)

    def outlive(self, failure: Exception) -> Program[None]:
        """Regroup with the ranks that are left; raises `failure` if they cannot go on."""
        while self._now is not None and self._now.handle.done() and not self._now.handle.failed():
            yield from self._take()
        while True:
            present, life = (yield from regroup(failure)), self._loop.ranks.present.life
            self._loop.ranks.regroup(present, failure.ranks if isinstance(failure, MembersLeave) else ())
            if present.life != life:  # this rank was silent for so long that the others counted it as lost
                self._number = 0
            try:
                return (yield from self._meet_the_others())
            except PeerError as again:
                failure = again

    def _meet_the_others(self) -> Program[None]:
        """Agree on the round with the other ranks, and open it again with this rank's contribution."""
        leaving = self._handing_over.says()
        latest = yield from recovery.agree(self._parts, self._number, self._loop.step, self._merged, leaving)
        if not latest.round:
            raise PeerError(
                "all ranks that held the model are lost, and the ranks that joined do not have it; restart the run, from a checkpoint if there is one"
            )
        if self._number < latest.round:
            self._catch_up(latest)
        leavers = yield from self._handing_over.meet(latest.leaving)
        if leavers and self._handing_over.leaves:
            self.has_left = True
            return
        if leavers:
            ranks = [self._loop.ranks.present.ranks[place] for place in leavers]
            raise MembersLeave(f"ranks {ranks} left, and the others could not go on", ranks)
        rests, self._closing = self._closing.resting, self._closing.anew()
        self._now = waiting = yield from self._closing.wait(self._number)
        if self._sent is not None and self._closing.may_answer(waiting.round):
            yield from self._offer(waiting.round)
        if rests:
            yield from self.rest()
        self._timed = (yield from now()), self._steps

    def _catch_up(self, latest: recovery.FurthestProgress) -> None:
        """Take the state of ranks that are ahead: by one round, or by any number if this rank has just joined."""
        comes, self._merged = not self._number, latest.members
        fragment = self._fragment(self._number or latest.round)
        before = [s["anchor"] for s in fragment.loop.states]
        for bucket, state in zip((p for part in self._parts for p in part.buckets), latest.states):
            bucket.states["schedule"].update(state)
        self._number = latest.round
        if comes:
            for each in self._fragments:
                each.forget()
                each.write()
            self._since, self._due, self._sent = 0, None, None
            self._loop.step = latest.step
        else:
            merged = self._sent is not None and self._loop.ranks.present.ranks[self._loop.ranks.rank] in self._merged
            self._is_over(fragment, merged, True, before)

    # -- checkpoint state ------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Write the progress to the schedule's state, for a checkpoint."""
        due = None if self._due is None else max(self._due - self._steps, 0)
        for fragment in self._fragments:
            fragment.keep(WorkerProgress(self._number, self._since, due))

    def _fragment(self, number: int) -> PendingFragment:
        """Return the fragment that a round averages."""
        return self._fragments[(number - 1) % len(self._fragments)]

    @property
    def _waiting(self) -> PendingRound:
        assert self._now is not None, "open() was not called"
        return self._now
