"""Messages between the ranks of a simulation: those on their way, and the ranks that wait for one."""

from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from gossamer.core.errors import PeerError
from gossamer.core.groups import members, named
from gossamer.core.verbs import Among, Receive, Send
from gossamer.costs.events import RequestTime

if TYPE_CHECKING:
    from gossamer.fabrics.sim import SimTask, Simulation


class MessageRoute(NamedTuple):
    """Sender, receiver, comm thread and group of a message; `source` is None for a receive from any rank."""

    source: int | None
    to: int
    lane: str
    among: Among


class SimMail:
    """Answers sends and receives. Messages of one route arrive in the order of sending."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._wires = defaultdict[MessageRoute, deque[tuple[float, Tensor]]](deque)  # with the time of arrival
        self._readers = dict[MessageRoute, tuple["SimTask", Receive]]()
        self._link_free = defaultdict[int, float](float)  # when the link of a node is free

    def send(self, task: "SimTask", verb: Send) -> None:
        """Send a message: the sender continues at once, and its node's link is busy until the wire is out."""
        sim = self._sim
        to, network = members(verb, sim.size)[verb.to], sim.network
        node = network.node_of(task.rank)
        leaves = network.node_of(to) != node
        begin = max(task.clock, self._link_free[node]) if leaves else task.clock
        when = RequestTime(begin, task.step, task.handle.label)
        seconds, latency = network.message(verb.wire.numel(), task.rank, to, when)
        out = begin + seconds
        if leaves:
            self._link_free[node] = out
        sim.line(task.rank, "sending", out - seconds, out)
        sim.note(task, verb, seconds)
        route = MessageRoute(task.rank, to, task.lane, verb.among)
        self._wires[route].append((out + latency, verb.wire))
        anybody = route._replace(source=None)
        if route in self._readers:
            self._deliver(route, *self._readers.pop(route))
        elif anybody in self._readers:
            sim.at(out + latency, partial(self._look, anybody, out + latency))
        sim.wake(task, task.clock)

    def receive(self, task: "SimTask", verb: Receive) -> None:
        sim = self._sim
        ranks = members(verb, sim.size)
        source = None if verb.source is None else ranks[verb.source]
        route = MessageRoute(source, task.rank, task.lane, verb.among)
        sender = "any rank" if source is None else f"rank {source}"
        task.waits = f"a message of {verb.length} bytes from {sender}{named(verb.among)}"
        sim.note(task, verb, 0.0)
        if source is not None and self._wires[route]:
            self._deliver(route, task, verb)
            return
        self._readers[route] = task, verb
        if source is None:
            heads = [self._wires[mine][0] for r in ranks if self._wires[mine := route._replace(source=r)]]
            for arrival in {task.clock, *(a for a, _ in heads)}:
                sim.at(max(arrival, task.clock), partial(self._look, route, max(arrival, task.clock)))

    def forget(self, rank: int, clock: float) -> None:
        """A rank is lost: nobody reads for it any more, and what it has sent and is still on its way never arrives."""
        for route in [route for route in self._readers if route.to == rank]:
            del self._readers[route]
        for route, wires in self._wires.items():
            while route.source == rank and wires and wires[-1][0] > clock:
                wires.pop()

    def clear(self) -> None:
        self._wires.clear()
        self._readers.clear()

    def _look(self, route: MessageRoute, clock: float) -> None:
        """Deliver the earliest message that has arrived to a rank that receives from any rank."""
        if route not in self._readers:
            return
        task, verb = self._readers[route]
        boxes = [route._replace(source=r) for r in members(verb, self._sim.size)]
        there = [box for box in boxes if self._wires[box] and self._wires[box][0][0] <= clock]
        if there:
            del self._readers[route]
            self._deliver(min(there, key=lambda box: self._wires[box][0][0]), task, verb)

    def _deliver(self, route: MessageRoute, task: "SimTask", verb: Receive) -> None:
        arrival, wire = self._wires[route].popleft()
        source = route.source
        assert source is not None
        if wire.numel() == verb.length:
            answer = wire if verb.source is not None else (members(verb, self._sim.size).index(source), wire)
            self._sim.wake(task, arrival, answer)
            return
        wrong = f"rank {source} sends {wire.numel()} bytes to rank {route.to}, which expects {verb.length}"
        error = PeerError(f"{wrong} (at {task.handle.label!r}, step {task.step})")
        self._sim.wake(task, arrival, error=error)
