"""Events of a simulated run: ranks that compute slowly for a while, links whose rate changes, messages that come late, and
ranks that are lost, leave, or come.

The first three change times and no number. What is random is drawn by seed, rank, step and kind, so that a run repeats exactly.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from gossamer.core.errors import CostError
from gossamer.costs.quantities import say_rate, say_seconds

ANYBODY = -1  # in place of a rank: whichever begins a step first


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
class Absence:
    """A rank is lost, and back so many seconds later; with `told` it says so before, and its last step counts. If it is
    `silent`, as a machine without power is, its connections do not break.
    """

    rank: int
    seconds: float = inf
    told: bool = False
    begin: Begin = Begin()
    silent: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise CostError(f"back must be more than 0, not {self.seconds:g}")

    def __str__(self) -> str:
        back = "for ever" if self.seconds == inf else f"for {say_seconds(self.seconds)}"
        how = "leaves, and says so" if self.told else "falls silent" if self.silent else "is lost"
        return f"rank {self.rank} {how}, {back}, at {self.begin}"


@dataclass(frozen=True)
class LaterStart:
    """A rank is not there at the start; it comes when another begins that step, or at that time."""

    rank: int
    begin: Begin

    def __str__(self) -> str:
        return f"rank {self.rank} comes at {self.begin}"


@dataclass(frozen=True)
class Events:
    """What happens in a run, whichever recipe trains; `seed` is that of late messages."""

    slow: tuple[SlowSteps, ...] = ()
    links: tuple[LinkRate, ...] = ()
    late: tuple[LateMessages, ...] = ()
    absences: tuple[Absence, ...] = ()
    arrivals: tuple[LaterStart, ...] = ()
    seed: int = 0

    @property
    def changes_ranks(self) -> bool:
        return bool(self.absences or self.arrivals)

    def sentences(self) -> list[str]:
        every = (*self.slow, *self.links, *self.late, *self.absences, *self.arrivals)
        return [str(event) for event in every]


class RequestTime(NamedTuple):
    """When a request begins on the virtual clock, in which step, and in which program."""

    clock: float
    step: int
    label: str


class _Change(NamedTuple):
    """A rank goes or comes: whether it is there afterwards, and whether it goes after a notice."""

    at: float
    rank: int
    there: bool
    told: bool = False


@dataclass(eq=False)
class EventClock:
    """The events of one run, as its ranks reach them.

    While some ranks are away the others are numbered anew: `places` holds the rank of the whole run for each.
    """

    events: Events = Events()
    places: Sequence[int] = ()
    _began: Counter[int] = field(default_factory=Counter)  # steps that a rank has begun, those done again included
    _latest: dict[int, int] = field(default_factory=dict[int, int])  # the step that it has begun last
    _first: dict[tuple[int, Begin], tuple[int, float]] = field(
        default_factory=dict[tuple[int, Begin], tuple[int, float]]
    )
    _requests: Counter[tuple[int, int, str]] = field(default_factory=Counter)

    def of(self, places: Sequence[int]) -> "EventClock":
        """The clock of a part of the ranks; what they have reached counts for all."""
        return replace(self, places=tuple(places))

    def begin(self, rank: int, step: int, clock: float) -> None:
        rank = self._whole(rank)
        own = (*self.events.slow, *self.events.links, *self.events.absences)
        begins = [(rank, event.begin) for event in own if event.rank == rank]
        begins += [(ANYBODY, event.begin) for event in self.events.arrivals]
        for whose, begin in begins:
            if begin.reached(step, clock):
                self._first.setdefault((whose, begin), (self._began[rank], clock))
        self._began[rank] += 1
        self._latest[rank] = step

    def go_on(self, rank: int, made: int) -> None:
        """Note steps of an earlier run: what began with one of them is over, but for slow steps that are left."""
        for step in range(1, made + 1):
            self.begin(rank, step, 0.0)
        self._first.update({key: (count, -inf) for key, (count, _) in self._first.items()})

    def factor(self, rank: int) -> float:
        """By how much longer than usual a rank computes in the step that it has begun."""
        rank, factor = self._whole(rank), 1.0
        for slow in self.events.slow:
            first = self._first.get((rank, slow.begin)) if slow.rank == rank else None
            if first is not None and self._began[rank] - first[0] <= slow.steps:
                factor *= slow.factor
        return factor

    def present(self, ranks: Iterable[int], clock: float) -> list[int]:
        """Those of some ranks that are there at a moment."""
        return [rank for rank in ranks if not any(begin <= clock < end for begin, end in self._away(rank))]

    def next_loss(self, clock: float) -> float:
        """The first moment from this one on at which a rank comes, or goes without having said so, as far as it is known."""
        return min((each.at for each in self._changes() if not each.told and self._is_ahead(each, clock)), default=inf)

    def next_notice(self, clock: float) -> float:
        """The first moment from this one on at which a rank says that it leaves, as far as it is known."""
        return min((each.at for each in self._changes() if each.told and self._is_ahead(each, clock)), default=inf)

    def _is_ahead(self, change: "_Change", clock: float) -> bool:
        """True if a change is still to come, or comes at this very moment and those that are numbered do not show it yet."""
        shown = not self.places or (change.rank in self.places) == change.there
        return change.at > clock or (change.at == clock and not shown)

    def latest_step(self) -> int:
        """The largest step that a rank has begun."""
        return max(self._latest.values(), default=0)

    def _away(self, rank: int) -> list[tuple[float, float]]:
        """From when until when a rank is not there."""
        gone = [
            (self._moment(rank, event.begin), event.seconds) for event in self.events.absences if event.rank == rank
        ]
        late = [self._moment(ANYBODY, event.begin) for event in self.events.arrivals if event.rank == rank]
        return [(begin, begin + seconds) for begin, seconds in gone] + [(-inf, end) for end in late]

    def _changes(self) -> Iterator["_Change"]:
        """The moments at which ranks go or come."""
        for event in self.events.absences:
            begin = self._moment(event.rank, event.begin)
            yield _Change(begin, event.rank, there=False, told=event.told)
            yield _Change(begin + event.seconds, event.rank, there=True)
        for event in self.events.arrivals:
            yield _Change(self._moment(ANYBODY, event.begin), event.rank, there=True)

    def _moment(self, rank: int, begin: Begin) -> float:
        if not begin.step:
            return begin.seconds
        return self._first.get((rank, begin), (0, inf))[1]

    def _whole(self, rank: int) -> int:
        return self.places[rank] if self.places else rank

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
        whole, out = {self._whole(rank) for rank in ranks}, list[tuple[float, float, float]]()
        for link in self.events.links:
            if link.rank in whole and (begin := self._moment(link.rank, link.begin)) < inf:
                out.append((begin, begin + link.seconds, link.rate))
        return out

    def lateness(self, rank: int, messages: int, when: RequestTime) -> float:
        """Seconds by which a rank's request is late if one of its messages is."""
        if not self.events.late or not messages:
            return 0.0
        rank = self._whole(rank)
        step = when.step or self._latest.get(rank, 0)
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
