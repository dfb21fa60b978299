"""Simulates a run under `gossamer.members()`: ranks are lost, leave and come, and the others go on without a restart.

The ranks that are there meet and hand over by the same programs as on real processes (`integrations/regrouping.py`), and their
recipe's own schedule drops a step, runs a round's average again, or averages models. Only the fabric differs, and the steps of a
training loop, which hooks make there.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import nn

from gossamer.core.errors import CostError, PeerError
from gossamer.core.verbs import Program, regroup
from gossamer.costs.events import Absence, Events
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import TimeSpan, simulate
from gossamer.fabrics.sim_members import MembersMet, MemberTimes, SimMembers
from gossamer.integrations.checks.elastic_checks import refuse_recipe
from gossamer.recipe import Recipe
from gossamer.runtime import Worker
from gossamer.simulated_bodies import Replica, ReplicaMaker
from gossamer.simulated_member_steps import MemberBackward, MemberCrew, MemberSteps


class MembersChange(NamedTuple):
    """Ranks were lost, left or came, and those that are there met again."""

    clock: float  # when the first of them was gone, or noticed to have come
    noticed: float
    resumed: float  # when the last of those that are there went on
    step: int  # with which they went on
    lost: tuple[int, ...]
    left: tuple[int, ...]
    came: tuple[int, ...]
    present: tuple[int, ...]
    dropped: int  # gradients of those who stayed
    unshared: int  # steps that the lost ones had taken since the end of a round


@dataclass
class MembersRun:
    """A run with all changes of its members. Dropped steps are not counted in losses, and with their time and bytes in all else."""

    ledger: Ledger
    replicas: dict[int, Replica] = field(default_factory=dict[int, Replica])  # by rank, of those there in the end
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list[float])  # of each step, the mean over the ranks that made it
    moments: list[float] = field(default_factory=list[float])  # when the first of them ended it
    gradients: int = 0  # steps that count, summed over ranks
    changes: list[MembersChange] = field(default_factory=list[MembersChange])
    stood: float = 0.0  # seconds in which ranks met and handed over, or computed what was dropped, summed over ranks
    lost_residual: float = 0.0  # norms of what lost ranks had not sent, as they last told them, summed
    spans: list[TimeSpan] = field(default_factory=list[TimeSpan])  # time lines; see `fabrics.sim`

    @property
    def dropped(self) -> int:
        return sum(change.dropped for change in self.changes)


def starting(
    recipe: str | Recipe,
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    most: int,
    seed: int = 0,
) -> Callable[[int], Replica]:
    """Return what makes the replica of a process that has just started, one of up to `most`: all with the same parameters."""
    return ReplicaMaker(recipe, model, optimizer, most, seed).of_its_own


def train(
    crew: MemberCrew, size: int, steps: int, events: Events, least: int | None = None, times: MemberTimes | None = None
) -> MembersRun:
    """Train `steps` steps on up to `size` ranks, of which `events` take some away and bring some, and the others go on.

    Training begins when `least` ranks are there; by default with those that are there at the start. A recipe that cannot go on
    without a lost rank is refused as `attach` refuses it. Buffers run on by themselves, on each rank its own.
    """
    costs = crew.costs.of_a_run()
    costs.require(size)
    return _Training(crew._replace(costs=costs), size, steps, events, least, times or MemberTimes()).run()


class _Training:
    """What the processes of a run have in common."""

    def __init__(
        self, crew: MemberCrew, size: int, steps: int, events: Events, least: int | None, times: MemberTimes
    ) -> None:
        self.crew, self.steps, self._size, self._times = crew, steps, size, times
        later = {each.rank for each in events.arrivals}
        there = [rank for rank in range(size) if rank not in later]
        if not 1 <= (least or len(there)) <= size:
            raise CostError(f"least must lie from 1 to {size}, the number of ranks, not {least or len(there)}")
        plan = [(0.0, partial(self._come, rank)) for rank in there]
        plan += [(e.begin.seconds, partial(self._lose, e)) for e in events.absences if not e.begin.step]
        plan += [
            (e.begin.seconds + times.starting, partial(self._come, e.rank)) for e in events.arrivals if not e.begin.step
        ]
        self.members = SimMembers(self._process, least or len(there), times, plan)
        self._due = [e for e in (*events.absences, *events.arrivals) if e.begin.step]  # that begin with a step
        self._leaving = dict[int, Absence]()
        self.out = MembersRun(Ledger(per_node=crew.costs.links.per_node))
        self._losses, self._moments = dict[int, list[float]](), dict[int, float]()
        self.owes = dict[int, float]()  # norms of what ranks have not sent, as they told last
        self._dropped, self._unshared = Counter[int](), Counter[int]()
        self._step, self._resumed = Counter[int](), dict[int, float]()  # by the number of the generation

    def run(self) -> MembersRun:
        programs = [_absent() for _ in range(self._size)]
        found = simulate(programs, self.crew.costs.links, self.out.ledger, attendance=self.members)
        if not all(step in self._losses for step in range(1, self.steps + 1)):
            raise CostError(
                "all ranks are lost and none comes to others at work; give at least one of them 'back', or lose fewer"
            )
        out, met = self.out, self.members.met
        last = {rank for rank in met[-1].ranks if rank in self.out.replicas}
        out.replicas = {rank: out.replicas[rank] for rank in sorted(last)}
        out.seconds = max(self._moments.values() if not last else (out.replicas[rank].clock for rank in last))
        out.losses = [sum(each) / len(each) for _, each in sorted(self._losses.items())]
        out.moments = [clock for _, clock in sorted(self._moments.items())]
        out.lost_residual = max(replica.worker.record.lost_residual for replica in out.replicas.values())
        out.spans = found.spans
        out.changes = [self._change(number, each) for number, each in enumerate(met) if number]
        return out

    def _change(self, number: int, met: MembersMet) -> MembersChange:
        return MembersChange(
            min(met.gone_at, met.noticed),
            met.noticed,
            self._resumed.get(number, met.clock),
            self._step[number],
            met.lost,
            met.left,
            met.came,
            met.ranks,
            self._dropped[number],
            self._unshared[number],
        )

    # -- processes -------------------------------------------------------------------------------------------------------

    def _process(self, rank: int) -> Program[None]:
        present = yield from regroup(PeerError(f"rank {rank} has come"))
        replica = self.crew.start(rank)
        refuse_recipe(replica.worker.origin)
        self.out.replicas[rank] = replica
        replica.worker.record.listener = self.out.ledger.hear
        yield from MemberSteps(self, rank, replica, present).run()

    def _come(self, rank: int, clock: float) -> None:
        if not self.members.is_there(rank):
            self.members.come(rank, clock)

    def _lose(self, absence: Absence, clock: float) -> None:
        rank = absence.rank
        if not self.members.is_there(rank):
            return
        if absence.told:
            self._leaving[rank] = absence
            return
        replica = self.out.replicas.pop(rank, None)
        if replica is not None:
            shape = replica.worker.recipe.schedule.shape
            self._unshared[len(self.members.met)] += (replica.worker.step - 1) % shape.period
        self.members.lose(rank, clock, "silent" if absence.silent else "lost")
        self._comes_back(absence, clock)

    def _comes_back(self, absence: Absence, clock: float) -> None:
        if absence.seconds < inf:
            self.members.at(clock + absence.seconds + self._times.starting, partial(self._come, absence.rank))

    def leaves(self, rank: int, worker: Worker, clock: float) -> bool:
        ends_round = worker.recipe.schedule.ends_round(worker.step - 1)
        if rank not in self._leaving or worker.step > self.steps or not ends_round:
            return False  # after the last step there is nothing to leave
        absence = self._leaving.pop(rank)
        self.out.replicas.pop(rank)
        self.members.at(clock, partial(self.members.lose, rank, how="left"))
        self._comes_back(absence, clock)
        return True

    # -- what they tell --------------------------------------------------------------------------------------------------

    def begins(self, rank: int, step: int, clock: float) -> None:
        self.crew.costs.links.events.begin(rank, step, clock)
        for event in [e for e in self._due if e.begin.reached(step, clock)]:
            if isinstance(event, Absence) and event.rank == rank:
                self.members.at(clock, partial(self._lose, event))
            elif not isinstance(event, Absence):
                self.members.at(clock + self._times.starting, partial(self._come, event.rank))
            else:
                continue
            self._due.remove(event)

    def made(self, rank: int, step: int, clock: float, loss: float) -> None:
        self._losses.setdefault(step, []).append(loss)
        self._moments[step] = min(clock, self._moments.get(step, inf))
        self.out.gradients += 1
        self.out.replicas[rank].clock = clock

    def dropped(self, seconds: float) -> None:
        self._dropped[len(self.members.met) - 1] += 1
        self.out.stood += seconds

    def went_on(self, step: int, began: float, clock: float) -> None:
        number = len(self.members.met) - 1
        self._step[number] = max(step, self._step[number])
        self._resumed[number] = max(clock, self._resumed.get(number, 0.0))
        self.out.stood += clock - began


def _absent() -> Program[None]:
    """The program of a rank before its process starts."""
    yield from ()


__all__ = ["MemberBackward", "MemberCrew", "MemberTimes", "MembersChange", "MembersRun", "starting", "train"]
