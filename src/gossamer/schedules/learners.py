"""A learner of rounds that close without the latest: a lane that is always there, and a thread of training at its own pace.

Who may touch what: the training thread alone writes parameters, the schedule's states and a `Fragment`. Of a `Round` it writes
`offer`, before it claims a ticket; the lane reads that once enough tickets are drawn, and never else. The lane writes `opened`
and `closed`, each once; the training thread only asks, and both answers are right. Whoever draws this rank's ticket, the
training thread or, while that rests, the lane, first wins the right to (`Closing.may_answer`), so that there is one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from gossamer.core.moments import Moment, ask
from gossamer.core.schedule import Loop
from gossamer.core.verbs import Program, claim, join, now
from gossamer.kernels.finite import all_finite
from gossamer.schedules.closing import Closing, Offer, Round, Rule, Waiting

Landing = Literal["", "progress", "anchor"]
LANDINGS: tuple[Landing, ...] = ("", "progress", "anchor")


@dataclass(eq=False)
class Fragment:
    """A part of the model, the steps that were not merged yet, and how it lands: with its progress since "start", or without."""

    loop: Loop
    steps: int = 0
    tokens: float = 0.0
    merged: int = 0  # and those that were
    landing: Landing = ""

    def write(self) -> None:
        """Land on the anchor, which has moved."""
        if not self.landing:
            return
        states = self.loop.states
        values = [s["anchor"] for s in states]
        if self.landing == "progress" and self.steps:
            values = [x.sub_(s["start"]).add_(s["anchor"]) for x, s in zip(self.loop.parameters(), states)]
        self.loop.write(values)
        for state in states:
            state.pop("start", None)
        self.landing = ""

    def forget(self) -> None:
        """Nothing of its steps will be merged: it lands where all are."""
        self.steps, self.tokens, self.landing = 0, 0.0, "anchor"
        for state in self.loop.states:
            state.pop("start", None)


class Learner:
    """The training thread's side: it counts steps, answers, and lands what the lane has closed."""

    def __init__(self, loop: Loop, parts: Sequence[Loop], rule: Rule, lane: str) -> None:
        self._loop, self._rule = loop, rule
        self._fragments = [Fragment(part) for part in parts]
        self._closing = Closing(loop, parts, rule, lane)
        self._steps = 0  # of this rank, since it began
        self._since = (loop.step - 1) % rule.slot  # those since it last answered or landed
        self._due: int | None = None  # the step at which what it answered lands
        self._sent: tuple[int, float] | None = None  # steps and tokens of what it answered, until that is settled
        self._timed: tuple[float, int] = (0.0, 0)  # when computing began, and after which step
        self._number = self._restore()
        self._now: Waiting | None = None

    # -- the training thread -------------------------------------------------------------------------------------------

    def open(self) -> Program[None]:
        """Start waiting for the first round."""
        self._timed = (yield from now()), self._steps
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
        yield from self._land_if_due()
        while self._due is None and self._waiting.round.closed and self._waiting.handle.done():
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

    def _is_asked(self) -> bool:
        """Whether it is time for a round, or somebody else has found so."""
        round = self._waiting.round
        if self._since >= self._rule.slot:
            return not round.closed
        return round.opened and not round.closed and self._fragment(round).steps >= self._rule.least

    def _answer(self) -> Program[None]:
        """Offer how far this rank has come, and claim a ticket."""
        round = self._waiting.round
        fragment = self._fragment(round)
        held = fragment.loop.parameters()
        if not all_finite(
            held
        ):  # which is known when the device has come so far: it is for devices to say who is first
            fragment.forget()
            self._since, self._due = 0, self._steps
            self._loop.give_up()
            return
        if not self._closing.may_answer(round):
            return
        self._since, self._due = 0, self._steps + self._rule.overlap
        self._sent = fragment.steps, fragment.tokens
        if fragment.steps:
            round.offer = Offer(self._moved(fragment, held), self._rule.weigh(*self._sent), Moment(held[0].device))
        yield from claim(round.name)

    def _moved(self, fragment: Fragment, held: Sequence[Tensor]) -> list[Tensor]:
        """How far a fragment has moved away from the anchor; what it is now is remembered until it lands."""
        moved = list[Tensor]()
        for place, x in zip(fragment.loop.places, held):
            state = place.states["schedule"]
            state["start"] = x
            moved.append(torch.sub(state["anchor"], x, out=place.layout.buffers.like(x)))
        return moved

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
        self._now = settled.follows
        fragment, (sent, self._sent) = self._fragment(round), (self._sent, None)
        before, fine = [s["anchor"] for s in fragment.loop.states], all(map(isfinite, ask(settled.largest)))
        for place, mean in zip(fragment.loop.places, settled.means if fine else []):
            self._rule.outer.take(place, mean, 1.0)
        if fine:
            self._loop.accept(settled.members)
        if settled.merged and not fine:
            fragment.forget()
            self._loop.give_up()
        elif settled.merged and sent is not None:
            fragment.merged += sent[0]
            fragment.steps, fragment.tokens = fragment.steps - sent[0], fragment.tokens - sent[1]
            fragment.landing = "progress"
        elif fine:
            self._is_late(fragment, before)
        if self._due is None:
            self._since, self._due = 0, self._steps

    def _is_late(self, fragment: Fragment, before: Sequence[Tensor]) -> None:
        """A round closed without this rank: what it learned meanwhile stays with it, and is merged later."""
        if not self._rule.keeps:
            fragment.forget()
        elif not fragment.landing:  # else an earlier round has not landed yet
            for state, anchor in zip(fragment.loop.states, before):
                state["start"] = anchor
            fragment.landing = "progress"

    # -- what is kept --------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Put what a checkpoint must hold where it is found."""
        due = -1 if self._due is None else max(self._due - self._steps, 0)
        for fragment in self._fragments:
            numbers = {
                "round": self._waiting.round.number,
                "since": self._since,
                "due": due,
                "steps": fragment.steps,
                "tokens": fragment.tokens,
                "merged": fragment.merged,
                "landing": LANDINGS.index(fragment.landing),
            }
            for state in fragment.loop.states:
                state.update({k: torch.tensor(float(v), dtype=torch.float64) for k, v in numbers.items()})

    def _restore(self) -> int:
        """Take up what was kept; the number of the next round."""
        number = 1
        for fragment in self._fragments:
            state = fragment.loop.states[0]
            if "round" in state:
                number = int(state["round"])
            if "since" not in state:
                continue
            self._since, due = int(state["since"]), int(state["due"])
            self._due = None if due < 0 else due
            fragment.steps, fragment.tokens = int(state["steps"]), float(state["tokens"])
            fragment.merged, fragment.landing = int(state["merged"]), LANDINGS[int(state["landing"])]
        return number

    def _fragment(self, round: Round) -> Fragment:
        return self._fragments[(round.number - 1) % len(self._fragments)]

    @property
    def _waiting(self) -> Waiting:
        assert self._now is not None, "the learner was never opened"
        return self._now
