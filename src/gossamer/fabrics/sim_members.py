"""Members of a simulation: ranks that are lost, leave and come while the others go on, as on real processes.

A process takes part in one generation of members after the other. A loss breaks the generation: what waits for the network fails
on every member, and each comes to the next one by `Regroup`, when its training thread notices. A rank that comes waits for
that. Ranks of programs are numbered among those who are there; here they are seats, which are the ranks of the simulation.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from gossamer.core.errors import CostError, PeerError
from gossamer.core.groups import among
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Present,
    Program,
    Receive,
    Regroup,
    Send,
    Shared,
    TakeTicket,
    Verb,
    WaitQuorum,
)
from gossamer.fabrics.liveness.seats import BEAT, LOOK
from gossamer.fabrics.sim import SimHandle, SimTask, Simulation

NOBODY_HAS_THE_MODEL = "all ranks that held the model are lost, and the ranks that joined do not have it; restart the run, from a checkpoint if there is one"
COMM = AllReduce | AllGather | AllToAll


@dataclass(frozen=True)
class MemberTimes:
    """What `members()` waits for, in seconds: a machine that falls silent, ranks that look for those who still beat, the
    connections of a new generation, and a process that starts, from when its machine is there.
    """

    silence: float = 10.0
    look: float = LOOK
    connecting: float = 0.1
    starting: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < inf for each in (self.silence, self.look, self.connecting, self.starting)):
            raise CostError("silence, look, connecting and starting must be 0 seconds or more")


class MembersMet(NamedTuple):
    """A generation of members, and how it came about: who was lost or left, and since when, and who came."""

    noticed: float  # when the one before it broke
    clock: float  # when it was agreed on
    ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    came: tuple[int, ...] = ()
    gone_at: float = inf  # when the first of those was gone


@dataclass(eq=False)
class _Generation:
    """The members from one meeting to the next, the incarnation of each, and what has happened to them."""

    lives: dict[int, int]
    gone: dict[int, tuple[float, str]] = field(default_factory=dict[int, tuple[float, str]])  # by seat: when and how
    broken: float = inf  # when the first noticed that it is over
    called: float = inf  # when those at work notice that a rank comes

    def goes_on(self, seat: int, life: int) -> bool:
        return self.lives.get(seat) == life and seat not in self.gone


class SimMembers:
    """Lets ranks be lost and come. `start(seat)` makes the program of a process that has just started, whose first request
    is a `Regroup`; training begins with `least` of them. `plan` holds what is to happen, and when.
    """

    def __init__(
        self,
        start: Callable[[int], Program[Any]],
        least: int,
        times: MemberTimes,
        plan: Sequence[tuple[float, Callable[[float], None]]],
    ) -> None:
        self._start, self._least, self.times, self._plan = start, least, times, plan
        self.met = list[MembersMet]()  # all generations
        self._now = _Generation({})
        self._lives, self._count = dict[int, int](), 0  # of the processes that run, by seat
        self._joined = set[int]()  # lives of processes that came to others
        self._waiting = dict[int, SimTask]()  # processes that have come to the next meeting
        self._proposed: list[int] | None = None  # those with whom the next generation is to begin
        self._doomed = set[SimTask]()  # tasks of earlier generations that still compute
        self._crossing = dict[SimTask, tuple[Shared, int]]()  # the last request of a task, and how many it had made
        self._over = set[int]()  # lives of processes that have ended by themselves

    # -- the simulation asks ---------------------------------------------------------------------------------------------

    def opens(self, simulation: Simulation) -> None:
        """Called once, before the first program runs."""
        self._sim = simulation
        for clock, act in self._plan:
            self.at(clock, act)

    def hears(self, task: SimTask, verb: Verb) -> Verb | None:
        """The request as the simulation is to answer it; None where it is answered already, or never."""
        self._crossing.pop(task, None)
        if not self._runs(task):
            return None
        if isinstance(verb, Regroup):
            self._regroup(task, verb.failure)
            return None
        if not isinstance(verb, Shared) or (task.lane == "compute" and isinstance(verb, COMM)):
            return verb  # a collective of the training thread is heard again on its comm thread
        if self._is_over_for(task) or self._breaks(task, verb):
            self._refuse(task)
            return None
        self._crossing[task] = verb, task.asked
        return among(verb, tuple(self._now.lives))

    # -- processes start and end -----------------------------------------------------------------------------------------

    def at(self, clock: float, act: Callable[[float], None]) -> None:
        """Act at a moment of the virtual clock."""
        self._sim.at(clock, partial(act, clock))

    def come(self, seat: int, clock: float) -> None:
        """Start the process of a seat: one that ran before has ended."""
        task = SimTask(seat, "compute", self._start(seat), SimHandle(f"rank {seat}"), clock=clock)
        self._count += 1
        self._lives[seat] = self._count
        self._sim.mains[seat] = task
        self._sim.wake(task, clock)

    def lose(self, seat: int, clock: float, how: str = "lost") -> None:
        """End a process: it is "lost" (its connections break), "silent" (they do not), or has "left"."""
        if seat not in self._lives:
            return
        life = self._lives.pop(seat)
        self._waiting.pop(seat, None)
        self._end_process(seat, clock)
        if self._proposed is not None and seat in self._proposed:
            self.at(clock + self.times.look, self._propose)
        if not self._now.goes_on(seat, life):
            return
        self._now.gone[seat] = clock, how
        waits, over = self._stop_what_crosses(seat, clock), self._now
        if how != "silent" and waits:
            self.at(clock + self._sim.network.latency, partial(self._break, generation=over))
        self.at(clock + self.times.silence, partial(self._break, generation=over))

    def ends(self, seat: int, clock: float) -> None:
        """Note that a process is through with its steps: who meets again does so without it."""
        self._over.add(self._lives.pop(seat))
        self._now.gone[seat] = clock, "ended"
        if self._proposed:
            self._propose(clock)
        elif not self._at_work():
            for late in [*self._waiting]:
                self._turn_away(late, clock, None)

    def is_there(self, seat: int) -> bool:
        return seat in self._lives

    @property
    def is_broken(self) -> bool:
        return self._now.broken < inf

    def is_called(self, clock: float) -> bool:
        """True if those at work have heard that they have to meet: a rank comes, or the generation is broken."""
        return min(self._now.called, self._now.broken + self.times.look) <= clock

    def _end_process(self, seat: int, clock: float) -> None:
        sim = self._sim
        main, tasks = sim.mains[seat], [task for task in self._tasks() if task.rank == seat]
        sim.mains[seat] = SimTask(seat, "compute", _over(), SimHandle(main.handle.label, finished=clock), clock=clock)
        for task in (main, *tasks):
            self._take_out(task).program.close()
        sim.forget(seat, clock)

    def _stop_what_crosses(self, seat: int, clock: float) -> bool:
        """Let requests that need a lost rank wait from now on, also those whose bytes are on their way; True if any waits."""
        waits = False
        for task in self._tasks():
            verb, asked = self._crossing.get(task, (None, 0))
            needs = isinstance(verb, COMM) or (isinstance(verb, Receive) and self._source(verb) in (seat, None))
            if not needs or asked != task.asked:
                continue
            if not task.waits and task.clock > clock and (task.rank, task.lane) in self._sim.busy:
                waiting = self._take_out(task)
                waiting.waits = f"rank {seat}, which is lost"
                self._sim.busy[task.rank, task.lane] = waiting
                self._crossing[waiting] = self._crossing.pop(task)
                waits = True
            waits = waits or bool(task.waits)
        return waits

    def _source(self, verb: Receive) -> int | None:
        return None if verb.source is None or verb.among is not None else [*self._now.lives][verb.source]

    # -- a generation breaks ---------------------------------------------------------------------------------------------

    def _is_over_for(self, task: SimTask) -> bool:
        """True if a task is of a generation that is over, or its process of none."""
        mine = self._now.goes_on(task.rank, self._lives.get(task.rank, 0))
        return task in self._doomed or self.is_broken or not mine

    def _breaks(self, task: SimTask, verb: Shared) -> bool:
        """True if a request finds out that the generation is over: it needs a rank that is gone, or one comes meanwhile."""
        gone = {seat for seat, (_, how) in self._now.gone.items() if how != "silent"}
        match verb:
            case AllReduce() | AllGather() | AllToAll():
                over = bool(gone)
            case Send(to):
                over = [*self._now.lives][to] in gone
            case Receive():
                over = self._source(verb) in gone
            case WaitQuorum():
                over = self._now.called < inf
            case TakeTicket():
                over = False
        if over:
            self._break(task.clock)
        return over

    def _break(self, clock: float, generation: _Generation | None = None) -> None:
        """End the generation: all that its members wait for fails, and what still computes fails at its next request."""
        now, sim = self._now, self._sim
        if self.is_broken or (generation is not None and generation is not now):
            return
        now.broken = clock
        for place in [*sim.queues]:
            queued = [*sim.queues[place]]
            sim.queues[place].clear()
            for task in queued:
                self._fail(task, clock)
        for held in (sim.meetings, sim.mail, sim.tickets):
            held.clear()
        tasks = [task for _, task in sorted(sim.busy.items(), key=lambda item: item[0])]
        stuck = {task for task in tasks if task.waits}
        for task in tasks:
            task.handle.waiting = [waiting for waiting in task.handle.waiting if waiting not in stuck]
        self._doomed |= {task for task in tasks if task not in stuck}
        for task in tasks:
            if task in stuck:
                self._fail(task, clock)

    def _refuse(self, task: SimTask) -> None:
        if task.lane == "compute":
            self._sim.wake(task, task.clock, error=self._failure(task))
        else:
            self._fail(task, task.clock)

    def _fail(self, task: SimTask, clock: float) -> None:
        """End a started program: like on real processes its comm thread is lost, and the failure is not thrown into it."""
        with suppress(RuntimeError):  # one that ignores that it is closed
            task.program.close()
        task.clock, task.waits = max(task.clock, clock), ""
        self._sim.finish(task, None, self._failure(task))
        self._sim.failures.pop()  # whoever joins it is told

    def _failure(self, task: SimTask) -> PeerError:
        gone = sorted(self._now.gone)
        why = f"rank(s) {gone} are gone" if gone else "ranks have come"
        return PeerError(f"rank {task.rank}: {why} (at {task.handle.label!r}, step {task.step})")

    # -- the members meet again ------------------------------------------------------------------------------------------

    def _regroup(self, task: SimTask, failure: Exception) -> None:
        seat, clock = task.rank, task.clock
        task.waits = "the other members"
        if self._now.goes_on(seat, self._lives[seat]):
            called = self._now.called <= clock
            if not (self.is_broken or self._now.gone or called):
                self._sim.wake(task, clock, error=failure)  # the same ranks would fail again
                return
            self._break(clock)
            self._waiting[seat] = task
            if self._proposed is None:
                self._proposed = []
                looks = self.times.look if self._now.gone else BEAT
                self.at(clock + looks, self._propose)
            else:
                self._begin_if_all_are_here(clock)
            return
        self._waiting[seat] = task
        self._let_in(seat, clock)

    def _let_in(self, seat: int, clock: float) -> None:
        """A process has come that is in no generation, or in one that is over."""
        if not self.met:
            if len(self._waiting) >= self._least:
                self._proposed = sorted(self._waiting)
                self._now.broken = clock
                self._begin_if_all_are_here(clock)
        elif self._at_work():
            self._call(clock)
        else:
            has_ended = any(how == "ended" for _, how in self._now.gone.values())
            self._turn_away(seat, clock, None if has_ended else PeerError(NOBODY_HAS_THE_MODEL))

    def _call(self, clock: float) -> None:
        """Call those at work: the ones that wait for a quorum notice at once, the others at the end of a step."""
        now = self._now
        if self.is_broken or now.called < inf:
            return
        now.called = clock + self.times.look
        if self._sim.tickets.are_awaited:
            now.called = clock
            self._break(clock)

    def _turn_away(self, seat: int, clock: float, error: Exception | None) -> None:
        """End a process that finds nobody at work."""
        task = self._waiting.pop(seat)
        self._lives.pop(seat, None)
        if error is not None:
            self._sim.wake(task, clock, error=error)
        else:
            self._end_process(seat, clock)

    def _at_work(self) -> list[int]:
        return [seat for seat, life in self._now.lives.items() if seat not in self._now.gone and life not in self._over]

    def _propose(self, clock: float) -> None:
        """Propose the next generation: all that go on, and those who have come."""
        if self._proposed is None:
            return
        comers = [seat for seat in self._waiting if not self._now.goes_on(seat, self._lives[seat])]
        self._proposed = sorted({*self._at_work(), *comers}) if self._at_work() else []
        self._begin_if_all_are_here(clock)
        if not self._at_work():
            self._proposed = None
            for seat in comers:
                self._let_in(seat, clock)

    def _begin_if_all_are_here(self, clock: float) -> None:
        proposed = self._proposed
        if not proposed or not all(seat in self._waiting for seat in proposed):
            return
        before, lives = self._now, {seat: self._lives[seat] for seat in proposed}
        came = tuple(seat for seat, life in lives.items() if before.lives.get(seat) != life)
        self._joined |= {lives[seat] for seat in came} if self.met else set()
        at = clock + (self.times.connecting if self.met else 0.0)
        gone = before.gone
        self.met.append(
            MembersMet(
                min(before.broken, at),
                at,
                tuple(proposed),
                _those(gone, ("lost", "silent")),
                _those(gone, ("left", "ended")),
                came,
                min((when for when, _ in gone.values()), default=inf),
            )
        )
        self._now, self._proposed = _Generation(lives), None
        self._doomed = {*self._tasks()}  # some began after the generation was broken
        for place, seat in enumerate(proposed):
            present = Present(place, tuple(proposed), tuple(lives.values()), lives[seat] in self._joined)
            self._sim.wake(self._waiting.pop(seat), at, present)
        if self._waiting:  # others have come since
            self._call(at)

    # -- tasks -----------------------------------------------------------------------------------------------------------

    def _runs(self, task: SimTask) -> bool:
        """True if it is not one of a process that has ended."""
        if task.lane == "compute":
            return self._sim.mains[task.rank] is task
        return self._sim.busy.get((task.rank, task.lane)) is task

    def _tasks(self) -> Iterable[SimTask]:
        return [*self._sim.busy.values(), *(task for queued in self._sim.queues.values() for task in queued)]

    def _take_out(self, task: SimTask) -> SimTask:
        """Take a task out of the event that would resume it: the same task, which nothing resumes."""
        same = replace(task, answer=None, error=None)
        task.program, task.handle, task.answer, task.error = _over(), SimHandle(task.handle.label), None, None
        return same


def _those(gone: dict[int, tuple[float, str]], how: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(sorted(seat for seat, (_, what) in gone.items() if what in how))


def _over() -> Program[None]:
    """A program that has ended."""
    program: Program[None] = (verb for verb in ())
    next(program, None)
    return program
