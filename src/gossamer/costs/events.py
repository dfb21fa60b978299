"""Events of a simulated run: ranks that compute slowly for a while, links whose rate changes, messages that come late.

Events change times and no number. What is random is drawn by seed, rank, step and kind, so that a run repeats exactly.
"""

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from gossamer.core.errors import CostError
from gossamer.costs.quantities import say_rate, say_seconds


class Begin(NamedTuple):
    """When an event begins: with a step, counted from 1, or at a moment of the virtual clock."""

    step: int = 0
    seconds: float = 0.0

    def reached(self, step: int, clock: float) -> bool:
        return step >= self.step and clock >= self.seconds

    def __str__(self) -> str:
        if self == Begin():
            return "the start"
        return f"step {self.step}" if self.step else say_seconds(self.seconds)


@dataclass(frozen=True)
class SlowSteps:
    """A rank computes `factor` times as long, in so many steps from the first that begins then."""

    rank: int
    factor: float
    steps: int
    begin: Begin = Begin()

    def __post_init__(self) -> None:
        if not 0 < self.factor < inf:
            raise CostError(f"factor must be more than 0, not {self.factor:g}")
        if self.steps < 1:
            raise CostError(f"steps must be at least 1, not {self.steps}")

    def __str__(self) -> str:
        return f"rank {self.rank} computes {self.factor:g} times as long in {self.steps} steps, from {self.begin} on"


@dataclass(frozen=True)
class LinkRate:
    """The link of a rank's node has this rate (bytes per second), both ways and for so many seconds."""

    rank: int
    rate: float
    seconds: float
    begin: Begin = Begin()

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise CostError(f"seconds must be more than 0, not {self.seconds:g}")

    def __str__(self) -> str:
        lasts = say_seconds(self.seconds)
        return f"the link of rank {self.rank} has {say_rate(self.rate)} for {lasts}, from {self.begin} on"


@dataclass(frozen=True)
class LateMessages:
    """A packet of a message between nodes is lost with chance `p` and sent again `seconds` later: it is late, never lost."""

    p: float
    seconds: float
    begin: Begin = Begin()

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise CostError(f"p must lie above 0 and up to 1, not {self.p:g}")
        if not self.seconds > 0:
            raise CostError(f"seconds must be more than 0, not {self.seconds:g}")

    def __str__(self) -> str:
        return f"a message is {say_seconds(self.seconds)} late with chance {self.p:.2g}, from {self.begin} on"


@dataclass(frozen=True)
class Events:
    """What happens in a run, whichever recipe trains; `seed` is that of late messages."""

    slow: tuple[SlowSteps, ...] = ()
    links: tuple[LinkRate, ...] = ()
    late: tuple[LateMessages, ...] = ()
    seed: int = 0

    def sentences(self) -> list[str]:
        return [*map(str, self.slow), *map(str, self.links), *map(str, self.late)]


class RequestTime(NamedTuple):
    """When a request begins on the virtual clock, in which step, and in which program."""

    clock: float
    step: int
    label: str


@dataclass(eq=False)
class EventClock:
    """The events of one run, as its ranks reach them."""

    events: Events = Events()
    _began: defaultdict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    _requests: Counter[tuple[int, int, str]] = field(default_factory=Counter)

    def begin(self, rank: int, step: int, clock: float) -> None:
        """Note that a rank begins a step."""
        self._began[rank].append((step, clock))

    def factor(self, rank: int) -> float:
        """By how much longer than usual a rank computes in the step that it has begun."""
        began, factor = self._began[rank], 1.0
        for slow in self.events.slow:
            if slow.rank == rank and 0 < len(began) - self._first(rank, slow.begin) <= slow.steps:
                factor *= slow.factor
        return factor

    def _first(self, rank: int, begin: Begin) -> int:
        """The index of the first step of a rank that begins then; the number of its steps if none has."""
        return bisect_left(self._began[rank], True, key=lambda at: begin.reached(*at))

    def transfer_seconds(
        self, length: float, cards: Sequence[tuple[range, float]], reached: float, begin: float
    ) -> float:
        """Seconds of so many bytes from `begin` on, over the slowest of some cards while their rates change.

        A card is that of some ranks and has its usual rate, of which a share is `reached`. Of several events the slowest counts.

        >>> clock = EventClock(Events(links=(LinkRate(rank=0, rate=10.0, seconds=5.0, begin=Begin(seconds=1.0)),)))
        >>> clock.transfer_seconds(300.0, [(range(1), 100.0)], 1.0, 0.0)  # 1 s at 100, 5 s at 10, and the rest at 100
        7.5
        """
        spells = [self._spells(ranks) for ranks, _ in cards]
        turns = {turn for each in spells for begins, ends, _ in each for turn in (begins, ends) if turn > begin}

        def rate(clock: float) -> float:
            return reached * min(_rate(usual, each, clock) for (_, usual), each in zip(cards, spells, strict=True))

        clock, left, taken = begin, length, 0.0
        for turn in sorted(turns):
            crossed = rate(clock) * (turn - clock)
            if left <= crossed:
                break
            left, taken, clock = left - crossed, taken + turn - clock, turn
        return taken + left / rate(clock)

    def _spells(self, ranks: range) -> list[tuple[float, float, float]]:
        """Begin, end and rate of the events of these ranks' card, as far as their steps have begun."""
        out = list[tuple[float, float, float]]()
        for link in self.events.links:
            if link.rank in ranks and (begin := self._clock_of(link)) < inf:
                out.append((begin, begin + link.seconds, link.rate))
        return out

    def _clock_of(self, link: LinkRate) -> float:
        if not link.begin.step:
            return link.begin.seconds
        began, first = self._began[link.rank], self._first(link.rank, link.begin)
        return began[first][1] if first < len(began) else inf

    def lateness(self, rank: int, messages: int, when: RequestTime) -> float:
        """Seconds by which a rank's request is late if one of its messages is."""
        if not self.events.late or not messages:
            return 0.0
        step = when.step or (self._began[rank][-1][0] if self._began[rank] else 0)
        place = rank, step, when.label
        self._requests[place] += 1
        late = 0.0
        for i, event in enumerate(self.events.late):
            dice = random.Random(f"{self.events.seed} {rank} {step} delay {i} {when.label} {self._requests[place]}")
            if event.begin.reached(step, when.clock) and dice.random() < 1 - (1 - event.p) ** messages:
                late += event.seconds
        return late


def _rate(usual: float, spells: Sequence[tuple[float, float, float]], clock: float) -> float:
    return min((rate for begin, end, rate in spells if begin <= clock < end), default=usual)
