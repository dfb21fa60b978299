"""Tickets: counters from which ranks take numbers, deleted when no rank can ask for them any more."""

import time
from collections import deque

from gossamer.core.verbs import WaitQuorum
from gossamer.fabrics.liveness.store import SharedStore

# A late rank may take a ticket after its counter was closed; it must not create keys again that were just deleted.
KEPT = 32


class Tickets:
    """The counters on a store, as one comm thread uses them.

    After a collective, every rank knows that all ranks have reached it, and so have read the counters of before. Rank 0
    deletes those, `KEPT` counters later. All others are `open` until all ranks have left.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store, self._raw, self._rank = store, store.raw, store.rank
        self._read = list[str]()  # by this rank, perhaps not yet by all
        self._done = deque[str]()  # read by all
        self._claimed = dict[str, None]()  # by this rank, and not seen closed yet

    def claim(self, name: str) -> int:
        self._claimed[name] = None
        ticket = self._raw.add(name, 1)
        self._raw.set(f"{name}/{ticket}", str(self._rank))
        return ticket

    def drawn(self, name: str) -> int:
        """Number of tickets taken so far."""
        return self._raw.add(name, 0)

    def settled(self, name: str, count: int | None) -> int:
        """Number of tickets with which a counter was closed; 0 while it is open.

        A rank that passes a `count` closes the counter with it, unless another rank has closed it before.
        """
        key = f"{name}/closed"
        if count is None and not self._store.are_there([key]):
            return 0
        if count is not None:
            self._raw.compare_set(key, "", str(count))
        (closed,) = self._store.numbers([key], below=self._store.size + 1)
        if not closed:
            raise self._store.malformed(key, "0")
        return closed

    def holders(self, name: str, count: int) -> tuple[int, ...] | None:
        """The ranks that took the first `count` tickets, in order; None while fewer are taken."""
        keys = [f"{name}/{i}" for i in range(1, count + 1)]
        if not self._store.are_there(keys):
            return None
        if name not in self._read:  # a quorum that grows is asked for again
            self._read.append(name)
            self._claimed.pop(name, None)
        return tuple(self._store.numbers(keys, below=self._store.size))

    def all_have_come(self) -> None:
        """Note that a collective has ended on this comm thread: all ranks have read the counters before it."""
        self._done.extend(self._read)
        self._read.clear()

    def sweep(self) -> None:
        """Delete counters that no rank needs any more; costs a few requests, so best done while waiting."""
        while len(self._done) > KEPT:
            name = self._done.popleft()
            if self._rank == 0:
                self._store.take_down(*keys_of(name, self._raw.add(name, 0)))

    def open(self) -> list[str]:
        """The counters that this rank knows of, by their full keys in the store."""
        return [self._store.place + name for name in dict.fromkeys([*self._done, *self._read, *self._claimed])]


class QuorumWait:
    """A rank's wait for tickets."""

    def __init__(self, tickets: Tickets, verb: WaitQuorum) -> None:
        self._tickets, self._verb, self._began = tickets, verb, time.monotonic()
        self.holders: tuple[int, ...] | None = None  # once it is met
        self.seen = list[float]()  # after how many seconds this rank saw each ticket, where there is a fallback

    def is_met(self) -> bool:
        """True if enough tickets are taken, or a fallback holds; the first rank to find that decides for all."""
        verb, tickets, count = self._verb, self._tickets, self._verb.count
        if verb.fallback:
            since, drawn = time.monotonic() - self._began, tickets.drawn(verb.name)
            self.seen += [since] * (drawn - len(self.seen))
            enough = drawn >= count or any(since >= s and drawn >= least for s, least in verb.fallback)
            count = tickets.settled(verb.name, min(drawn, count) if enough else None)
        self.holders = tickets.holders(verb.name, count) if count else None
        return self.holders is not None


def keys_of(name: str, count: int) -> list[str]:
    """The keys of a counter from which at most `count` tickets were taken."""
    return [name, f"{name}/closed", *(f"{name}/{i}" for i in range(1, count + 1))]
