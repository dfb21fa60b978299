"""The simulator: N programs, one process, a virtual clock.

Each rank has a compute lane (its program) and comm lanes (what it starts), as on the torch fabric. A collective ends
when its last rank has arrived, plus what it costs; a message arrives after its wire's time on the sender's link. No
threads, no wall clock: the same programs give the same numbers and the same times, always.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor

from gossamer.core.errors import DeadlockError, GossamerError, PeerError
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Claim,
    Closed,
    Compute,
    Descend,
    Join,
    Program,
    Receive,
    Send,
    Start,
    Ticket,
    Verb,
)
from gossamer.fabrics.collectives import Collective, Refused, answers, describe, mismatch
from gossamer.fabrics.ledger import Entry, Ledger, traffic


@dataclass(frozen=True)
class Network:
    """Links with a latency (seconds) and a rate (bytes per second, per rank or one for all)."""

    latency: float = 0.0
    rate: float | tuple[float, ...] = float("inf")

    def rate_of(self, rank: int) -> float:
        return self.rate[rank] if isinstance(self.rate, tuple) else self.rate

    def seconds(self, verb: Verb, size: int) -> float:
        """What a request costs once everybody is there: messages one after the other, at the slowest link's pace."""
        return self.delay(verb, size) + max(self.crossing(verb, r, size) for r in range(size))

    def delay(self, verb: Verb, size: int) -> float:
        return self.latency * (2 * (size - 1) if isinstance(verb, AllReduce) else size - 1)

    def crossing(self, verb: Verb, rank: int, size: int) -> float:
        """How long one rank's link is busy with its own request."""
        return max(traffic(verb, rank, size)[1:]) / self.rate_of(rank)


@dataclass(eq=False)
class SimTicket(Ticket[Any]):
    """A started program's result and the virtual time it was ready."""

    label: str
    finished: float | None = None
    result: Any = None
    error: Exception | None = None
    waiting: "list[_Task]" = field(default_factory=list)

    def done(self) -> bool:
        return self.finished is not None


@dataclass(eq=False)
class _Task:
    """A program on its way, on one lane of one rank."""

    rank: int
    lane: str
    program: Program[Any]
    ticket: SimTicket
    step: int = 0
    clock: float = 0.0
    answer: Any = None
    error: Exception | None = None
    waits: str = ""


@dataclass
class Outcome:
    """What a simulation gives back: each rank's result, the time its program ended, and the ledger of all ranks."""

    results: list[Any]
    clocks: list[float]
    ledger: Ledger


def simulate(programs: Sequence[Program[Any]], network: Network | None = None, ledger: Ledger | None = None) -> Outcome:
    """Run one program per rank to the end.

    >>> import torch
    >>> from gossamer.core.verbs import all_reduce
    >>> outcome = simulate([all_reduce(torch.tensor([float(r)])) for r in range(4)], Network(latency=1e-3))
    >>> [float(x) for x in outcome.results], outcome.clocks[0]
    ([6.0, 6.0, 6.0, 6.0], 0.006)
    """
    return _Simulation(len(programs), network or Network(), ledger or Ledger()).run(programs)


class _Simulation:
    def __init__(self, size: int, network: Network, ledger: Ledger) -> None:
        self.size, self.network, self.ledger = size, network, ledger
        self.order = count()
        self.ready: list[tuple[float, int, _Task]] = []
        self.queues: defaultdict[tuple[int, str], deque[_Task]] = defaultdict(deque)
        self.busy: dict[tuple[int, str], _Task] = {}
        self.meetings: defaultdict[str, deque[dict[int, tuple[_Task, Collective]]]] = defaultdict(deque)
        self.mail: defaultdict[tuple[int, int, str], deque[tuple[float, Tensor]]] = defaultdict(deque)
        self.readers: dict[tuple[int, int, str], tuple[_Task, int]] = {}
        self.link_free: defaultdict[int, float] = defaultdict(float)
        self.tickets: defaultdict[str, list[int]] = defaultdict(list)
        self.drawn_at: defaultdict[str, list[float]] = defaultdict(list)
        self.closing: defaultdict[str, list[tuple[int, _Task]]] = defaultdict(list)
        self.failures = list[Exception]()  # in the order of virtual time

    def run(self, programs: Sequence[Program[Any]]) -> Outcome:
        mains = [_Task(r, "compute", p, SimTicket(f"rank {r}")) for r, p in enumerate(programs)]
        for task in mains:
            self.wake(task, 0.0)
        while self.ready:
            _, _, task = heapq.heappop(self.ready)
            self.advance(task)
        if self.failures and any(t.ticket.error or not t.ticket.done() for t in mains):
            raise self.failures[0]  # whoever waits for the rank that failed is no news
        if not all(t.ticket.done() for t in mains):
            raise DeadlockError(self.explain(mains))
        return Outcome([t.ticket.result for t in mains], [t.clock for t in mains], self.ledger)

    def wake(self, task: _Task, clock: float, answer: Any = None, error: Exception | None = None) -> None:
        task.clock, task.answer, task.error, task.waits = max(task.clock, clock), answer, error, ""
        heapq.heappush(self.ready, (task.clock, next(self.order), task))

    def advance(self, task: _Task) -> None:
        """Give a task its answer and take its next request."""
        try:
            verb = task.program.throw(task.error) if task.error else task.program.send(task.answer)
        except StopIteration as stop:
            return self.finish(task, stop.value, None)
        except Exception as error:
            return self.finish(task, None, error)
        return self.ask(task, verb)

    def finish(self, task: _Task, result: Any, error: Exception | None) -> None:
        ticket = task.ticket
        ticket.finished, ticket.result, ticket.error = task.clock, result, error
        if error is not None:
            self.failures.append(error)
        for waiting in ticket.waiting:
            self.wake(waiting, task.clock, result, error)
        place = task.rank, task.lane
        if self.busy.get(place) is task:
            del self.busy[place]
            self.next_on(place, task.clock)

    def next_on(self, place: tuple[int, str], clock: float) -> None:
        if place not in self.busy and self.queues[place]:
            task = self.queues[place].popleft()
            self.busy[place] = task
            self.wake(task, clock)

    def ask(self, task: _Task, verb: Verb) -> None:
        match verb:
            case Compute():
                self.compute(task, verb)
            case Start(program, label, step, lane):
                self.wake(task, task.clock, self.start(task, program, label, step, lane))
            case Join(ticket):
                self.join(task, ticket)
            case AllReduce() | AllGather() | AllToAll() if task.lane == "compute":
                self.join(task, self.start(task, _once(verb), task.ticket.label, task.step, "comm"))
            case AllReduce() | AllGather() | AllToAll():
                self.meet(task, verb)
            case Send():
                self.send(task, verb)
            case Receive():
                self.receive(task, verb)
            case Claim(name):
                self.claim(task, name)
            case Closed(name, wanted):
                task.waits = f"ticket {wanted} of {name!r} ({len(self.tickets[name])} drawn)"
                self.closing[name].append((wanted, task))
                self.close(name)
            case Descend():
                self.wake(task, task.clock, error=GossamerError("Descend is answered by a host, not by a fabric"))

    def compute(self, task: _Task, verb: Compute) -> None:
        try:
            answer = verb.work()
        except Exception as error:
            return self.wake(task, task.clock + verb.seconds, error=error)
        return self.wake(task, task.clock + verb.seconds, answer)

    def start(self, task: _Task, program: Program[Any], label: str, step: int, lane: str) -> SimTicket:
        ticket = SimTicket(label)
        place = task.rank, lane
        self.queues[place].append(_Task(task.rank, lane, program, ticket, step, task.clock))
        self.next_on(place, task.clock)
        return ticket

    def join(self, task: _Task, ticket: Ticket[Any]) -> None:
        assert isinstance(ticket, SimTicket)
        if ticket.finished is not None:
            return self.wake(task, ticket.finished, ticket.result, ticket.error)
        task.waits = f"started program {ticket.label!r}"
        ticket.waiting.append(task)
        return None

    def meet(self, task: _Task, verb: Collective) -> None:
        """A lane's collectives meet in order: my k-th with everybody else's k-th."""
        meetings = self.meetings[task.lane]
        meeting = next((m for m in meetings if task.rank not in m), None)
        if meeting is None:
            meeting = dict[int, tuple[_Task, Collective]]()
            meetings.append(meeting)
        meeting[task.rank] = task, verb
        task.waits = f"{describe(verb)} of {task.ticket.label!r}"
        if len(meeting) == self.size:
            meetings.remove(meeting)
            self.hold([meeting[r] for r in range(self.size)])

    def hold(self, present: list[tuple[_Task, Collective]]) -> None:
        tasks, verbs = [t for t, _ in present], [v for _, v in present]
        wrong = mismatch(verbs) or _astray(tasks)
        began = max(t.clock for t in tasks)
        if wrong:
            for task in tasks:
                self.wake(task, began, error=PeerError(f"{wrong} (at {task.ticket.label!r}, step {task.step})"))
            return
        crossed = max(self.network.crossing(v, r, self.size) for r, v in enumerate(verbs))
        seconds = self.network.delay(verbs[0], self.size) + crossed
        for task, verb in present:
            self.note(task, verb, seconds)
        try:
            found = answers(verbs)
        except Refused as refused:  # by one rank's own making or reading of a wire; the others wait for it in vain
            self.wake(tasks[refused.rank], began + seconds, error=refused.reason)
            return
        for task, answer in zip(tasks, found, strict=True):
            self.wake(task, began + seconds, answer)

    def send(self, task: _Task, verb: Send) -> None:
        """The sender goes on at once; its link is busy until the wire is out."""
        seconds = verb.wire.numel() / min(self.network.rate_of(task.rank), self.network.rate_of(verb.to))
        out = max(task.clock, self.link_free[task.rank]) + seconds
        self.link_free[task.rank] = out
        self.note(task, verb, seconds)
        route = task.rank, verb.to, task.lane
        self.mail[route].append((out + self.network.latency, verb.wire))
        if route in self.readers:
            self.deliver(route, *self.readers.pop(route))
        self.wake(task, task.clock)

    def receive(self, task: _Task, verb: Receive) -> None:
        route = verb.source, task.rank, task.lane
        task.waits = f"a message of {verb.length} bytes from rank {verb.source}"
        self.note(task, verb, 0.0)
        if self.mail[route]:
            return self.deliver(route, task, verb.length)
        self.readers[route] = task, verb.length
        return None

    def deliver(self, route: tuple[int, int, str], task: _Task, length: int) -> None:
        arrival, wire = self.mail[route].popleft()
        if wire.numel() == length:
            return self.wake(task, arrival, wire)
        source, rank, _ = route
        said = f"rank {source} sends {wire.numel()} bytes to rank {rank}, which expects {length}"
        return self.wake(task, arrival, error=PeerError(f"{said} (at {task.ticket.label!r}, step {task.step})"))

    def claim(self, task: _Task, name: str) -> None:
        self.tickets[name].append(task.rank)
        self.drawn_at[name].append(task.clock)
        self.wake(task, task.clock, len(self.tickets[name]))
        self.close(name)

    def close(self, name: str) -> None:
        drawn = self.tickets[name]
        waiting, self.closing[name] = self.closing[name], []
        for wanted, task in waiting:
            if len(drawn) >= wanted:
                self.wake(task, self.drawn_at[name][wanted - 1] + self.network.latency, tuple(drawn[:wanted]))
            else:
                self.closing[name].append((wanted, task))

    def note(self, task: _Task, verb: Verb, seconds: float) -> None:
        handed, sent, received = traffic(verb, task.rank, self.size)
        name = type(verb).__name__
        self.ledger.note(Entry(task.step, task.rank, name, task.ticket.label, handed, sent, received, seconds))

    def explain(self, mains: list[_Task]) -> str:
        lines = [
            f"rank {t.rank} waits for {t.waits or 'nothing'}"
            + "".join(f"; its {lane} lane waits for {b.waits}" for (r, lane), b in self.busy.items() if r == t.rank)
            for t in mains
            if not t.ticket.done()
        ]
        ended = [f"rank {t.rank} has ended" for t in mains if t.ticket.done()]
        return "deadlock: nobody can go on.\n  " + "\n  ".join(lines + ended)


def _once(verb: Verb) -> Program[Any]:
    return (yield verb)


def _astray(tasks: list[_Task]) -> str:
    """Requests of one size can still belong to different blocks or steps; their sum would be nonsense."""
    first = tasks[0]
    for t in tasks:
        if (t.step, t.ticket.label) != (first.step, first.ticket.label) and t.step and first.step:
            return (
                f"rank 0 is at {first.ticket.label!r}, step {first.step} "
                f"while rank {t.rank} is at {t.ticket.label!r}, step {t.step}"
            )
    return ""
