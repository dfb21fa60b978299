"""The steps of one process of a simulated run under `members()`: what hooks do around a user's loop is one program here.

It drops a step, meets the others and takes part in what they are in the midst of as `integrations/schedule_steps.py` and
`fabrics/torch/reunion.py` do; what ranks say to one another then is `integrations/regrouping.py` itself.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import nn

from gossamer.core.errors import PeerError
from gossamer.core.programs import through
from gossamer.core.schedule import Elastic
from gossamer.core.step_phases import after_optimizer_step, until_optimizer_step
from gossamer.core.verbs import Compute, MembersChanged, Present, Program, Regroup, Verb, join, now, regroup
from gossamer.fabrics.sim_members import SimMembers
from gossamer.fabrics.torch.last_collective import level
from gossamer.fabrics.torch.reunion import Reunion
from gossamer.integrations.handover import Untrained
from gossamer.integrations.regrouping import Regrouping
from gossamer.integrations.shared import SharedBuffers
from gossamer.runtime import Worker
from gossamer.simulate import ClusterCosts, compute_gradients, descend
from gossamer.simulated_bodies import Replica

MemberBackward = Callable[[nn.Module, Present, int], float]  # (model, who is there, step): as `simulate.Backward`


class MemberCrew(NamedTuple):
    """The processes of a run: the replica of one that has just started, by its rank; how it computes, and what that costs."""

    start: Callable[[int], Replica]
    backward: MemberBackward
    costs: ClusterCosts


class Training(Protocol):
    """What the processes of a run have in common, and what they tell it."""

    crew: MemberCrew
    steps: int
    members: SimMembers
    owes: dict[int, float]  # norms of what ranks have not sent, as they told last

    def begins(self, rank: int, step: int, clock: float) -> None:
        """Note that a rank begins a step."""

    def made(self, rank: int, step: int, clock: float, loss: float) -> None:
        """Note a step that counts."""

    def dropped(self, seconds: float) -> None:
        """Note a gradient that was dropped, and how long it took."""

    def went_on(self, step: int, began: float, clock: float) -> None:
        """Note that a rank has met the others, from when it noticed until it goes on."""

    def leaves(self, rank: int, worker: Worker, clock: float) -> bool:
        """True if a rank ends its process now, with its round, as it said before."""
        ...


class _Residuals:
    """What members told of their residuals, as Regrouping asks for it."""

    owes, wants_to_know = 0.0, False
    is_called = False  # who simulates says when ranks meet

    def __init__(self, told: dict[int, float]) -> None:
        self._told = told
        self.parted = set[tuple[int, int]]()  # nobody is told to leave in a simulation

    def owed(self, ranks: list[int]) -> float:
        return sum(self._told.get(rank, 0.0) for rank in ranks)


class _SeatFabric:
    """The fabric of a rank, as Regrouping sees it. Virtual ranks are never a collective apart, so there is no reunion."""

    reunion: Reunion | None = None

    def __init__(self, present: Present, told: dict[int, float]) -> None:
        self.present, self.members = present, _Residuals(told)


class MemberSteps:
    """A process from when it is a member: each step, and what becomes of it when members go or come."""

    def __init__(self, training: Training, rank: int, replica: Replica, present: Present) -> None:
        self._training, self._rank, self._replica = training, rank, replica
        self.model, self.worker, self.optimizers = replica.model, replica.worker, [replica.optimizer]
        self.shared, self.stage = SharedBuffers(replica.model, replica.worker, "local"), 0
        self.fabric = _SeatFabric(present, training.owes)
        self.worker.untrained = Untrained(self.model, self.worker)
        self.worker.ranks.regroup(present)
        self._regrouping: Regrouping | None = None
        if not isinstance(self.worker.recipe.schedule, Elastic):
            self._regrouping = Regrouping(self, present.joins)
        self._meets = False  # True while this rank meets the others: then a failure ends the attempt
        self._told = 0.0  # when it told its residuals last

    def run(self) -> Program[None]:
        yield from through(self._until_the_end(), self._surviving)

    def _until_the_end(self) -> Program[None]:
        if self.fabric.present.joins:
            yield from self._join_in()
        elif self._regrouping is None:
            yield from self.worker.begin()
        while self.worker.step <= self._training.steps:
            yield from self._step()
            if self._training.leaves(self._rank, self.worker, (yield from now())):
                return
        if self._regrouping is None:
            yield from self.worker.quiesce()  # no member ends while others still need its answer
        self._training.members.ends(self._rank, (yield from now()))

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _step(self) -> Program[None]:
        worker, schedule, step = self.worker, self.worker.recipe.schedule, self.worker.step
        began = yield from now()
        self._training.begins(self._rank, step, began)
        loss = yield from self._compute(step)
        steps = worker.steps()
        try:
            if schedule.averages(step):
                yield from self._send()
            while missed := (yield from until_optimizer_step(steps)):
                worker.update_step.make_up(missed, self._replica.optimizer.step)
        except MembersChanged:
            yield from self._drop(began)
            return
        descended = descend(self._replica, schedule.averages(step))
        if not descended:
            worker.discard()
        self.stage = 1
        try:
            yield from after_optimizer_step(steps, descended)
        except MembersChanged:
            if schedule.shape.outlasts != "models":  # else they are equal now, and the step is over
                raise
        worker.end_step(descended)
        self.stage = 0
        self._training.made(self._rank, step, (yield from now()), loss)
        yield from self._between_steps()

    def _compute(self, step: int) -> Program[float]:
        worker, costs, present = self.worker, self._training.crew.costs, self.worker.ranks.present
        schedule, backward = worker.recipe.schedule, self._training.crew.backward
        costs.charge(self._rank, worker)
        seconds = costs.before(self._rank, step, schedule.shape.micro_batches, schedule.averages(step))
        gradients = partial(compute_gradients, self._replica, lambda model, _, step: backward(model, present, step))
        loss = worker.loss = yield Compute(gradients, "compute", seconds)
        return loss

    def _send(self) -> Program[None]:
        costs, worker = self._training.crew.costs, self.worker
        for i, flat in enumerate([bucket.gradients() for bucket in worker.buckets]):
            yield from costs.backward(self._rank, worker, i)
            yield from worker.ready(i, flat)

    def _drop(self, began: float) -> Program[None]:
        """Drop the step under way, as all members do; this rank may have to take part in the rest of another's."""
        self.worker.drop()
        self.shared.let_go()
        self.worker.update_step.put()
        self._training.dropped(self._met_at - began)
        yield from self._take_part()

    def _take_part(self) -> Program[None]:
        """Take part in the rest of a step that the others are in the midst of, and whose beginning this rank has taken over."""
        rest = 0 if self._regrouping is None else self._regrouping.rest
        if self._regrouping is None or not rest:
            return
        self._regrouping.rest, self.stage = 0, rest
        if rest == 1:
            steps = self.worker.steps()
            yield from until_optimizer_step(steps)
            yield from after_optimizer_step(steps, True)
        self.worker.end_step(True)
        self.stage = 0

    def _between_steps(self) -> Program[None]:
        """Tell what this rank owes, about once a second, and let in ranks that have come."""
        clock = yield from now()
        if self._regrouping is None or self.worker.step > self._training.steps:
            return
        if clock - self._told >= 1.0:
            self._told, self._training.owes[self._rank] = clock, self.worker.residual_norm()
        if self._training.members.is_called(clock):
            yield from self._see_through()
            yield from self._meet(PeerError("ranks have come"))
            yield from self._take_part()

    def _see_through(self) -> Program[None]:
        """Let averages and messages in flight come to their end, or fail; so a comm thread ends where nothing has failed."""
        self._meets = True
        try:
            for handle in self.worker.in_flight.handles:
                with suppress(PeerError):
                    yield from join(handle)
        finally:
            self._meets = False

    # -- members change --------------------------------------------------------------------------------------------------

    def _surviving(self, verb: Verb) -> Program[Any]:
        """Pass a request on; where it fails because members are gone or come, meet the others, and say that they changed."""
        if isinstance(verb, Regroup) and self._regrouping is None:
            return (yield from self._timed(verb))
        try:
            return (yield verb)
        except PeerError as failure:
            if self._meets or self._regrouping is None:
                raise
            yield from self._meet(failure)
            raise MembersChanged(f"the members have changed: {failure}") from failure

    def _timed(self, verb: Regroup) -> Program[Present]:
        """A schedule that regroups by itself does so."""
        began = yield from now()
        present = yield verb
        self._training.went_on(self.worker.step, began, (yield from now()))
        return present

    def _join_in(self) -> Program[None]:
        """Take what those at work hand over."""
        began = yield from now()
        if self._regrouping is None:
            yield from self.worker.begin()
            self._training.went_on(self.worker.step, began, (yield from now()))
            return
        try:
            yield from self._say()
        except PeerError as failure:
            yield from self._meet(failure)
        else:
            self._training.went_on(self.worker.step, began, (yield from now()))
        yield from self._take_part()

    def _meet(self, failure: PeerError) -> Program[None]:
        began = self._met_at = yield from now()
        while True:
            self.fabric.present = yield from self._asked_to_regroup(failure)
            try:
                yield from self._say()
            except PeerError as again:
                failure = again
            else:
                break
        self._training.went_on(self.worker.step, began, (yield from now()))

    def _asked_to_regroup(self, failure: PeerError) -> Program[Present]:
        self._meets = True
        try:
            return (yield from regroup(failure))
        finally:
            self._meets = False

    def _say(self) -> Program[None]:
        """What members say to one another when they meet; as `fabrics/torch/reunion.py` runs it."""
        assert self._regrouping is not None
        self._meets = True
        try:
            yield from level(None, 0, self.fabric.present.place, self.worker.device)
            yield from self._regrouping.meet()
        finally:
            self._meets = False
