"""The simulator: N programs in one process, on a virtual clock.

Each rank has a compute thread (its program) and comm threads (the programs it starts), all simulated, as on the torch fabric.
A collective begins when its last rank arrives and takes the time of its bytes and latency; a message arrives after its wire's
time on the sender's link. Real threads and real time play no part: equal programs give equal results and equal times.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import proxy

from gossamer.core.errors import DeadlockError, GossamerError, PeerError
from gossamer.core.groups import members, plain, refuse_group
from gossamer.core.programs import single
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Among,
    Compute,
    Handle,
    Join,
    Now,
    OptimizerStep,
    Program,
    Receive,
    Regroup,
    Send,
    Shared,
    Start,
    TakeTicket,
    Verb,
    WaitQuorum,
)
from gossamer.costs.crossing import traffic
from gossamer.costs.events import RequestTime
from gossamer.fabrics.collectives import Collective, Refused, answers, describe, mismatch
from gossamer.fabrics.ledger import Ledger, LedgerEntry
from gossamer.fabrics.links import ClusterLinks, Network
from gossamer.fabrics.sim_mail import SimMail
from gossamer.fabrics.sim_tickets import SimTickets

if TYPE_CHECKING:
    from gossamer.fabrics.sim_members import SimMembers

LINES = 16  # ranks whose time lines are kept


@dataclass(eq=False)
class SimHandle(Handle[Any]):
    """A started program's result, and the virtual time at which it was ready."""

    label: str
    finished: float | None = None
    result: Any = None
    error: Exception | None = None
    waiting: "list[SimTask]" = field(default_factory=list)

    def done(self) -> bool:
        return self.finished is not None

    def failed(self) -> bool:
        return self.error is not None


@dataclass(eq=False)
class SimTask:
    """A program that runs on one comm thread, or the compute thread, of one rank."""

    rank: int
    lane: str
    program: Program[Any]
    handle: SimHandle
    step: int = 0
    clock: float = 0.0
    asked: int = 0  # requests of the network that it has made
    answer: Any = None
    error: Exception | None = None
    waits: str = ""


class TimeSpan(NamedTuple):
    """What a rank did between two moments of the virtual clock."""

    rank: int
    kind: Literal["computing", "coding", "sending", "waiting"]
    begin: float
    end: float


@dataclass
class SimResult:
    """The outcome of a simulation: each rank's result, the time its program ended, and the ledger of all ranks.

    `spans` are the time lines of the first ranks; those of computing are there for all ranks. `stopped` is True where it was
    ended before all programs were through.
    """

    results: list[Any]
    clocks: list[float]
    ledger: Ledger
    spans: list[TimeSpan] = field(default_factory=list[TimeSpan])
    stopped: bool = False


def simulate(
    programs: Sequence[Program[Any]],
    network: Network | ClusterLinks | None = None,
    ledger: Ledger | None = None,
    begin: float = 0.0,
    until: Callable[[], float] = lambda: inf,
    attendance: "SimMembers | None" = None,
) -> SimResult:
    """Run one program per rank to the end, or until a moment of the virtual clock, which begins at `begin`.

    With `attendance`, ranks may be lost and come meanwhile.

    >>> import torch
    >>> from gossamer.core.verbs import all_reduce
    >>> outcome = simulate([all_reduce(torch.tensor([float(r)])) for r in range(4)], Network(latency=1e-3))
    >>> [float(x) for x in outcome.results], outcome.clocks[0]
    ([6.0, 6.0, 6.0, 6.0], 0.006)
    """
    network = network or Network()
    simulation = Simulation(len(programs), network, ledger or Ledger(per_node=network.per_node), attendance)
    return simulation.run(programs, begin, until)


class Simulation:
    """The programs under way, by rank and comm thread, and the events that are to come."""

    def __init__(
        self, size: int, network: Network | ClusterLinks, ledger: Ledger, attendance: "SimMembers | None" = None
    ) -> None:
        self.size, self.network, self.ledger, self.attendance = size, network, ledger, attendance
        self.mains = list[SimTask]()  # the compute thread of each rank
        self.order = count()
        self.ready: list[tuple[float, int, Callable[[], None]]] = []
        self.queues: defaultdict[tuple[int, str], deque[SimTask]] = defaultdict(deque)
        self.busy: dict[tuple[int, str], SimTask] = {}
        self.meetings: defaultdict[tuple[str, Among], deque[dict[int, tuple[SimTask, Collective]]]] = defaultdict(deque)
        mine = proxy(self)  # no circle: a simulation that has ended gives the memory of its wires back at once
        self.mail, self.tickets = SimMail(mine), SimTickets(mine)
        self.spans = list[TimeSpan]()
        self.failures = list[Exception]()  # in the order of virtual time

    def run(self, programs: Sequence[Program[Any]], begin: float, until: Callable[[], float]) -> SimResult:
        mains = self.mains = [SimTask(r, "compute", p, SimHandle(f"rank {r}")) for r, p in enumerate(programs)]
        if self.attendance is not None:
            self.attendance.opens(self)
        for task in mains:
            self.wake(task, begin)
        while self.ready:
            if self.ready[0][0] >= until() and not all(t.handle.done() for t in mains):
                return SimResult([], [t.clock for t in mains], self.ledger, self.spans, stopped=True)
            heapq.heappop(self.ready)[2]()
        if self.failures and any(t.handle.error or not t.handle.done() for t in mains):
            raise self.failures[0]  # that other ranks wait for the failed one is not the cause
        if not all(t.handle.done() for t in mains):
            raise DeadlockError(self.explain(mains))
        return SimResult([t.handle.result for t in mains], [t.clock for t in mains], self.ledger, self.spans)

    def wake(self, task: SimTask, clock: float, answer: Any = None, error: Exception | None = None) -> None:
        task.clock, task.answer, task.error, task.waits = max(task.clock, clock), answer, error, ""
        self.at(task.clock, partial(self.advance, task))

    def at(self, clock: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.ready, (clock, next(self.order), act))

    def advance(self, task: SimTask) -> None:
        """Resume a task with its answer, and handle its next request."""
        try:
            verb = task.program.throw(task.error) if task.error else task.program.send(task.answer)
        except StopIteration as stop:
            return self.after_work(task, partial(self.finish, task, stop.value, None))
        except Exception as error:
            return self.finish(task, None, error)
        if isinstance(verb, Shared):
            return self.after_work(task, partial(self.ask, task, verb))
        return self.ask(task, verb)

    def after_work(self, task: SimTask, act: Callable[[], None]) -> None:
        """Act when the processor has done a started program's work before its next request, or after its last."""
        seconds = 0.0 if task.lane == "compute" else self.network.work(task.rank, task.handle.label, task.asked)
        task.asked += 1
        if seconds == 0:
            return act()
        self.line(task.rank, "coding", task.clock, task.clock + seconds)
        task.clock += seconds
        return self.at(task.clock, act)

    def line(
        self, rank: int, kind: Literal["computing", "coding", "sending", "waiting"], begin: float, end: float
    ) -> None:
        if end > begin and (rank < LINES or kind == "computing"):
            self.spans.append(TimeSpan(rank, kind, begin, end))

    def finish(self, task: SimTask, result: Any, error: Exception | None) -> None:
        handle = task.handle
        handle.finished, handle.result, handle.error = task.clock, result, error
        if error is not None:
            self.failures.append(error)
        for waiting in handle.waiting:
            self.line(waiting.rank, "waiting", waiting.clock, task.clock)
            self.wake(waiting, task.clock, result, error)
        place = task.rank, task.lane
        if self.busy.get(place) is task:
            del self.busy[place]
            self.next_on(place, task.clock)

    def next_on(self, place: tuple[int, str], clock: float) -> None:
        if place not in self.busy and self.queues[place]:
            task = self.queues[place].popleft()
            self.busy[place] = task
            self.wake(task, max(task.clock, clock) + self.network.start)

    def forget(self, rank: int, clock: float) -> None:
        """A rank is lost: nothing of it runs or waits any more, and its time line ends."""
        self.spans = [s._replace(end=max(s.begin, min(s.end, clock))) if s.rank == rank else s for s in self.spans]
        for place in [place for place in (*self.busy, *self.queues) if place[0] == rank]:
            self.busy.pop(place, None)
            self.queues[place].clear()
        for meetings in self.meetings.values():
            for meeting in meetings:
                meeting.pop(rank, None)
        self.mail.forget(rank, clock)
        self.tickets.forget(rank)

    def ask(self, task: SimTask, verb: Verb) -> None:
        heard = verb if self.attendance is None else self.attendance.hears(task, verb)
        if heard is not None:
            self.answer(task, heard)

    def answer(self, task: SimTask, verb: Verb) -> None:
        if isinstance(verb, Shared):
            try:
                refuse_group(verb, task.rank, self.size)
            except ValueError as error:
                return self.wake(task, task.clock, error=error)
            verb = plain(verb, self.size)
        match verb:
            case Compute():
                self.compute(task, verb)
            case Now():
                self.wake(task, task.clock, task.clock)
            case Start(program, label, step, lane):
                self.wake(task, task.clock, self.start(task, program, label, step, lane))
            case Join(handle):
                self.join(task, handle)
            case AllReduce() | AllGather() | AllToAll() if task.lane == "compute":
                self.join(task, self.start(task, single(verb), task.handle.label, task.step, "comm"))
            case AllReduce() | AllGather() | AllToAll():
                self.meet(task, verb)
            case Send():
                self.mail.send(task, verb)
            case Receive():
                self.mail.receive(task, verb)
            case TakeTicket():
                self.tickets.take(task, verb)
            case WaitQuorum():
                self.tickets.wait(task, verb)
            case Regroup(failure):
                self.wake(task, task.clock, error=failure)
            case OptimizerStep():
                self.wake(
                    task,
                    task.clock,
                    error=GossamerError("OptimizerStep is answered by a host (an integration), not by a fabric"),
                )
        return None

    def compute(self, task: SimTask, verb: Compute) -> None:
        self.line(task.rank, "computing", task.clock, task.clock + verb.seconds)
        try:
            answer = verb.work()
        except Exception as error:
            return self.wake(task, task.clock + verb.seconds, error=error)
        return self.wake(task, task.clock + verb.seconds, answer)

    def start(self, task: SimTask, program: Program[Any], label: str, step: int, lane: str) -> SimHandle:
        handle = SimHandle(label)
        place = task.rank, lane
        self.queues[place].append(SimTask(task.rank, lane, program, handle, step, task.clock))
        self.next_on(place, task.clock)
        return handle

    def join(self, task: SimTask, handle: Handle[Any]) -> None:
        assert isinstance(handle, SimHandle)
        if handle.finished is not None:
            return self.wake(task, handle.finished, handle.result, handle.error)
        task.waits = f"started program {handle.label!r}"
        handle.waiting.append(task)
        return None

    def meet(self, task: SimTask, verb: Collective) -> None:
        """Match a collective with those of the other ranks, in order: the k-th of each rank on one comm thread and group."""
        meetings, ranks = self.meetings[task.lane, verb.among], members(verb, self.size)
        meeting = next((m for m in meetings if task.rank not in m), None)
        if meeting is None:
            meeting = dict[int, tuple[SimTask, Collective]]()
            meetings.append(meeting)
        meeting[task.rank] = task, verb
        task.waits = f"{describe(verb)} of {task.handle.label!r}"
        if len(meeting) == len(ranks):
            meetings.remove(meeting)
            self.hold([meeting[r] for r in ranks])

    def hold(self, present: list[tuple[SimTask, Collective]]) -> None:
        tasks, verbs = [t for t, _ in present], [v for _, v in present]
        ranks = [t.rank for t in tasks]
        wrong = mismatch(verbs, ranks) or _astray(tasks)
        began = max(t.clock for t in tasks)
        if wrong:
            for task in tasks:
                self.wake(task, began, error=PeerError(f"{wrong} (at {task.handle.label!r}, step {task.step})"))
            return
        when = RequestTime(began, tasks[0].step, tasks[0].handle.label)
        seconds = self.network.seconds(verbs, ranks, self.size, when)
        for task, verb in present:
            self.note(task, verb, seconds)
            self.line(task.rank, "sending", began, began + seconds)
        try:
            found = answers(verbs)
        except Refused as refused:  # one rank failed to make or read a wire; the others wait for it without end
            self.wake(tasks[refused.rank], began + seconds, error=refused.reason)
            return
        for task, answer in zip(tasks, found, strict=True):
            self.wake(task, began + seconds, answer)

    def note(self, task: SimTask, verb: Shared, seconds: float) -> None:
        moved = traffic(verb, task.rank, self.size, self.ledger.per_node)
        name, label = type(verb).__name__, task.handle.label
        self.ledger.note(LedgerEntry(task.step, task.rank, name, label, *moved[:3], seconds, moved.inside, verb.among))

    def explain(self, mains: list[SimTask]) -> str:
        lines = [
            f"rank {t.rank} waits for {t.waits or 'nothing'}"
            + "".join(
                f"; its comm thread {lane!r} waits for {b.waits}" for (r, lane), b in self.busy.items() if r == t.rank
            )
            for t in mains
            if not t.handle.done()
        ]
        ended = [f"rank {t.rank} has ended" for t in mains if t.handle.done()]
        return "deadlock: no rank can continue.\n  " + "\n  ".join(lines + ended)


def _astray(tasks: list[SimTask]) -> str:
    """Why these tasks are at different buckets or steps; empty if they are not.

    Requests of one size can still belong to different buckets or steps, and their sum would be meaningless.
    """
    first = tasks[0]
    for t in tasks:
        if (t.step, t.handle.label) != (first.step, first.handle.label) and t.step and first.step:
            return (
                f"rank {first.rank} is at {first.handle.label!r}, step {first.step} "
                f"while rank {t.rank} is at {t.handle.label!r}, step {t.step}"
            )
    return ""
