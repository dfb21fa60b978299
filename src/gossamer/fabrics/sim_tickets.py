"""Tickets of a simulation: counters from which ranks take numbers, and the ranks that wait for a quorum."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from gossamer.core.groups import members, named
from gossamer.core.verbs import Among, TakeTicket, TicketHolders, WaitQuorum

if TYPE_CHECKING:
    from gossamer.fabrics.sim import SimTask, Simulation


@dataclass(eq=False)
class TicketCounter:
    """The ranks that drew a ticket, by their place in the group and in order, when they did, and who waits for a quorum."""

    holders: list[int] = field(default_factory=list[int])
    drawn_at: list[float] = field(default_factory=list[float])
    waiting: list[tuple[WaitQuorum, "SimTask"]] = field(default_factory=list[tuple[WaitQuorum, "SimTask"]])
    closed: tuple[int, float] | None = None  # with so many tickets and when, for quorums with a fallback


class SimTickets:
    """Answers `TakeTicket` and `WaitQuorum`."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._counters = defaultdict[tuple[str, Among], TicketCounter](TicketCounter)

    @property
    def are_awaited(self) -> bool:
        """True if a rank waits for a quorum."""
        return any(counter.waiting for counter in self._counters.values())

    def take(self, task: "SimTask", verb: TakeTicket) -> None:
        counter = self._counters[verb.name, verb.among]
        counter.holders.append(members(verb, self._sim.size).index(task.rank))
        counter.drawn_at.append(task.clock)
        self._sim.wake(task, task.clock, len(counter.holders))
        self._answer_those_met(counter, task.clock)

    def wait(self, task: "SimTask", verb: WaitQuorum) -> None:
        counter = self._counters[verb.name, verb.among]
        task.waits = f"ticket {verb.count} of {verb.name!r}{named(verb.among)} ({len(counter.holders)} drawn)"
        counter.waiting.append((verb, task))
        for seconds, _ in verb.fallback:
            due = task.clock + seconds
            self._sim.at(due, partial(self._answer_those_met, counter, due))
        self._answer_those_met(counter, task.clock)

    def forget(self, rank: int) -> None:
        """A rank is lost: it waits for no quorum any more."""
        for counter in self._counters.values():
            counter.waiting = [(verb, task) for verb, task in counter.waiting if task.rank != rank]

    def clear(self) -> None:
        for counter in self._counters.values():  # whose fallbacks are still to come
            counter.waiting.clear()
        self._counters.clear()

    def _answer_those_met(self, counter: TicketCounter, now: float) -> None:
        at = counter.drawn_at
        waiting, counter.waiting = counter.waiting, []
        for verb, task in waiting:
            enough = (verb.count, at[verb.count - 1]) if len(at) >= verb.count else None
            if verb.fallback:
                enough = counter.closed or enough or _relented(verb, task.clock, at, now)
            if enough is None:
                counter.waiting.append((verb, task))
                continue
            if verb.fallback:
                counter.closed = enough
            count, when = enough
            holders = TicketHolders.seen(counter.holders[:count], [max(t - task.clock, 0.0) for t in at[:count]])
            self._sim.wake(task, when + self._sim.network.latency, holders)


def _relented(verb: WaitQuorum, asked: float, at: Sequence[float], now: float) -> tuple[int, float] | None:
    """Number of tickets and time at which a fallback of a quorum, asked for at `asked`, is met; None if none is."""
    due = [max(asked + seconds, at[least - 1]) for seconds, least in verb.fallback if len(at) >= least]
    return (len(at), now) if due and min(due) <= now else None
