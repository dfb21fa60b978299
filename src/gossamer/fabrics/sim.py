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
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from gossamer.core.errors import DeadlockError, GossamerError, PeerError
from gossamer.core.groups import members, named, plain, refuse_group
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
    TicketHolders,
    Verb,
    WaitQuorum,
)
from gossamer.costs.crossing import traffic
from gossamer.costs.events import RequestTime
from gossamer.fabrics.collectives import Collective, Refused, answers, describe, mismatch
from gossamer.fabrics.ledger import Ledger, LedgerEntry
from gossamer.fabrics.links import ClusterLinks, Network

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
    attendance: "Attendance | None" = None,
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


class Attendance(Protocol):
    """Who takes part in a simulation whose ranks may be lost and come."""

    def opens(self, simulation: "Simulation") -> None:
        """Called once, before the first program runs."""
        ...

    def hears(self, task: SimTask, verb: Verb) -> Verb | None:
        """The request as the simulation is to answer it; None where it is answered already, or never."""
        ...


class Simulation:
    """The programs under way, by rank and comm thread, and the events that are to come."""

    def __init__(
        self, size: int, network: Network | ClusterLinks, ledger: Ledger, attendance: Attendance | None = None
    ) -> None:
        self.size, self.network, self.ledger, self.attendance = size, network, ledger, attendance
        self.mains = list[SimTask]()  # the compute thread of each rank
        self.order = count()
        self.ready: list[tuple[float, int, Callable[[], None]]] = []
        self.queues: defaultdict[tuple[int, str], deque[SimTask]] = defaultdict(deque)
        self.busy: dict[tuple[int, str], SimTask] = {}
        self.meetings: defaultdict[tuple[str, Among], deque[dict[int, tuple[SimTask, Collective]]]] = defaultdict(deque)
        self.mail: defaultdict[MessageRoute, deque[tuple[float, Tensor]]] = defaultdict(deque)
        self.readers: dict[MessageRoute, tuple[SimTask, Receive]] = {}
        self.link_free: defaultdict[int, float] = defaultdict(float)
        self.tickets: defaultdict[_Counter, list[int]] = defaultdict(list)
        self.drawn_at: defaultdict[_Counter, list[float]] = defaultdict(list)
        self.closing: defaultdict[_Counter, list[tuple[WaitQuorum, SimTask]]] = defaultdict(list)
        self.decided = dict[_Counter, tuple[int, float]]()  # number of tickets and time, for quorums with a fallback
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
                self.join(task, self.start(task, _once(verb), task.handle.label, task.step, "comm"))
            case AllReduce() | AllGather() | AllToAll():
                self.meet(task, verb)
            case Send():
                self.send(task, verb)
            case Receive():
                self.receive(task, verb)
            case TakeTicket():
                self.claim(task, verb)
            case WaitQuorum(name, wanted, among, fallback):
                counter = name, among
                task.waits = f"ticket {wanted} of {name!r}{named(among)} ({len(self.tickets[counter])} drawn)"
                self.closing[counter].append((verb, task))
                for seconds, _ in fallback:
                    self.at(task.clock + seconds, partial(self.close, counter, task.clock + seconds))
                self.close(counter, task.clock)
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

    def send(self, task: SimTask, verb: Send) -> None:
        """Send a message: the sender continues at once, and its node's link is busy until the wire is out."""
        to, network = members(verb, self.size)[verb.to], self.network
        node = network.node_of(task.rank)
        leaves = network.node_of(to) != node
        begin = max(task.clock, self.link_free[node]) if leaves else task.clock
        when = RequestTime(begin, task.step, task.handle.label)
        seconds, latency = network.message(verb.wire.numel(), task.rank, to, when)
        out = begin + seconds
        if leaves:
            self.link_free[node] = out
        self.line(task.rank, "sending", out - seconds, out)
        self.note(task, verb, seconds)
        route = MessageRoute(task.rank, to, task.lane, verb.among)
        self.mail[route].append((out + latency, verb.wire))
        anybody = route._replace(source=None)
        if route in self.readers:
            self.deliver(route, *self.readers.pop(route))
        elif anybody in self.readers:
            self.at(out + latency, partial(self.look, anybody, out + latency))
        self.wake(task, task.clock)

    def receive(self, task: SimTask, verb: Receive) -> None:
        ranks = members(verb, self.size)
        source = None if verb.source is None else ranks[verb.source]
        route = MessageRoute(source, task.rank, task.lane, verb.among)
        sender = "any rank" if source is None else f"rank {source}"
        task.waits = f"a message of {verb.length} bytes from {sender}{named(verb.among)}"
        self.note(task, verb, 0.0)
        if source is not None and self.mail[route]:
            return self.deliver(route, task, verb)
        self.readers[route] = task, verb
        if source is None:
            heads = [self.mail[mine][0] for r in ranks if self.mail[mine := route._replace(source=r)]]
            for arrival in {task.clock, *(a for a, _ in heads)}:
                self.at(max(arrival, task.clock), partial(self.look, route, max(arrival, task.clock)))
        return None

    def look(self, route: "MessageRoute", clock: float) -> None:
        """Deliver the earliest message that has arrived to a rank that receives from any rank."""
        if route not in self.readers:
            return
        task, verb = self.readers[route]
        boxes = [route._replace(source=r) for r in members(verb, self.size)]
        there = [box for box in boxes if self.mail[box] and self.mail[box][0][0] <= clock]
        if there:
            del self.readers[route]
            self.deliver(min(there, key=lambda box: self.mail[box][0][0]), task, verb)

    def deliver(self, route: "MessageRoute", task: SimTask, verb: Receive) -> None:
        arrival, wire = self.mail[route].popleft()
        source = route.source
        assert source is not None
        if wire.numel() == verb.length:
            answer = wire if verb.source is not None else (members(verb, self.size).index(source), wire)
            return self.wake(task, arrival, answer)
        wrong = f"rank {source} sends {wire.numel()} bytes to rank {route.to}, which expects {verb.length}"
        return self.wake(task, arrival, error=PeerError(f"{wrong} (at {task.handle.label!r}, step {task.step})"))

    def claim(self, task: SimTask, verb: TakeTicket) -> None:
        counter = verb.name, verb.among
        self.tickets[counter].append(members(verb, self.size).index(task.rank))
        self.drawn_at[counter].append(task.clock)
        self.wake(task, task.clock, len(self.tickets[counter]))
        self.close(counter, task.clock)

    def close(self, counter: "_Counter", now: float) -> None:
        drawn, at = self.tickets[counter], self.drawn_at[counter]
        waiting, self.closing[counter] = self.closing[counter], []
        for verb, task in waiting:
            enough = (verb.count, at[verb.count - 1]) if len(drawn) >= verb.count else None
            if verb.fallback:
                enough = self.decided.get(counter) or enough or _relented(verb, task.clock, at, now)
            if enough is None:
                self.closing[counter].append((verb, task))
                continue
            if verb.fallback:
                self.decided[counter] = enough
            count, when = enough
            holders = TicketHolders.seen(drawn[:count], [max(t - task.clock, 0.0) for t in at[:count]])
            self.wake(task, when + self.network.latency, holders)

    def note(self, task: SimTask, verb: Shared, seconds: float) -> None:
        moved = traffic(verb, task.rank, self.size, self.ledger.per_node)
        entry = LedgerEntry(
            task.step,
            task.rank,
            type(verb).__name__,
            task.handle.label,
            moved.handed,
            moved.sent,
            moved.received,
            seconds,
            moved.inside,
            verb.among,
        )
        self.ledger.note(entry)

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


_Counter = tuple[str, Among]


class MessageRoute(NamedTuple):
    """Sender, receiver, comm thread and group of a message; `source` is None for a receive from any rank."""

    source: int | None
    to: int
    lane: str
    among: Among


def _once(verb: Verb) -> Program[Any]:
    return (yield verb)


def _relented(verb: WaitQuorum, asked: float, at: Sequence[float], now: float) -> tuple[int, float] | None:
    """Number of tickets and time at which a fallback of a quorum, asked for at `asked`, is met; None if none is."""
    due = [max(asked + seconds, at[least - 1]) for seconds, least in verb.fallback if len(at) >= least]
    return (len(at), now) if due and min(due) <= now else None


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
