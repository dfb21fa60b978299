"""Averages and messages in flight, which complete at a later step, by bucket."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.core.bucket import PendingState
from gossamer.core.contracts import Exchange
from gossamer.core.verbs import Handle, Program, join

Carried = tuple[Tensor, Tensor]  # an agreed mean and its largest absolute value, computed while other buckets travel
Wires = list[Tensor]


@dataclass(eq=False)
class InFlight:
    """Averages that were launched together: the results of all are used, or of none."""

    # By bucket; empty when all have arrived.
    handles: dict[int, Handle[Carried]] = field(default_factory=dict[int, Any])
    drafts: list[PendingState] = field(default_factory=list[PendingState])  # the state changes to commit
    given: list[Tensor] = field(default_factory=list[Tensor])  # the largest absolute values of this rank's input
    means: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # the means that have arrived
    renewed: set[int] = field(default_factory=set[int])  # buckets whose first average after a change of members this is
    lost: bool = False  # true if a mean is not finite
    step: int = 0  # at which they were launched
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # this rank's input, where they may run again
    over: Exchange | None = None  # instead of the recipe's exchange and memory
    broken: bool = False  # true if they have to run again, since the members have changed

    def add(self, index: int, handle: Handle[Carried], drafts: Sequence[PendingState]) -> None:
        self.handles[index] = handle
        self.drafts += drafts

    def breaks(self) -> None:
        """Forget what has arrived: all of it is to run again."""
        self.broken, self.handles, self.drafts, self.means = True, {}, [], {}


class InFlightTable:
    """The averages and messages in flight; each bucket has at most one of each."""

    def __init__(self) -> None:
        self._flights = dict[int, InFlight]()
        self._handles = dict[int, Handle[Wires]]()
        self._arrived = dict[int, Wires]()

    # -- averages ----------------------------------------------------------------------------------------------------

    @property
    def averages(self) -> list[InFlight]:
        return list(dict.fromkeys(self._flights.values()))

    @property
    def lost(self) -> list[int]:
        """The buckets whose averages have arrived and are not finite."""
        return [i for i, flight in self._flights.items() if flight.lost]

    def add(self, which: Iterable[int], flight: InFlight) -> None:
        self._flights |= dict.fromkeys(which, flight)

    def of(self, which: Iterable[int]) -> list[InFlight]:
        """The averages in flight that contain some buckets, each once."""
        return list(dict.fromkeys(self._flights[i] for i in which if i in self._flights))

    def pop(self, which: Iterable[int]) -> None:
        for i in which:
            self._flights.pop(i, None)

    @property
    def broken(self) -> list[InFlight]:
        """The averages that have to run again, in the order of their launches."""
        return [flight for flight in self.averages if flight.broken]

    def told(self) -> list[tuple[list[int], int]]:
        """What others are told of averages that have to run again: buckets, and the step of their launch."""
        return [([*flight.values], flight.step) for flight in self.broken]

    def drop(self, flight: InFlight) -> None:
        self._flights = {i: each for i, each in self._flights.items() if each is not flight}

    def drop_posted(self) -> None:
        """Drop all messages that are still under way."""
        self._handles = {}

    def drop_messages(self) -> None:
        self._handles, self._arrived = {}, {}

    def landing(self) -> dict[int, Tensor]:
        """The means that have arrived, by bucket."""
        return {i: f.means[i] for i, f in self._flights.items() if not f.lost and i in f.means}

    # -- messages ----------------------------------------------------------------------------------------------------

    @property
    def messages(self) -> bool:
        return bool(self._handles) or bool(self._arrived)

    def post(self, index: int, handle: Handle[Wires]) -> None:
        self._handles[index] = handle

    def has_posted(self, which: Iterable[int]) -> bool:
        return any(i in self._handles or i in self._arrived for i in which)

    def has_come(self, which: Sequence[int]) -> bool:
        """True if these buckets have messages in flight, and all have arrived or are later than the deadline."""
        handles = [self._handles[i] for i in which if i in self._handles]
        return self.has_posted(which) and all(h.done() or h.overdue() for h in handles)

    def join_messages(self, which: Iterable[int]) -> Program[None]:
        """Wait for the messages of these buckets, and keep the wires received."""
        for i in which:
            if i in self._handles:
                self._arrived[i] = yield from join(self._handles.pop(i))

    def collect(self, which: Sequence[int]) -> list[Wires]:
        """The wires received, by bucket; empty where nothing was posted."""
        if not any(i in self._arrived for i in which):
            return []
        return [self._arrived.pop(i, []) for i in which]

    def arrived(self, which: Iterable[int]) -> list[Wires]:
        return [self._arrived.get(i, []) for i in which]

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def restore(self, landing: dict[int, Tensor], lost: Iterable[int], arrived: dict[int, Wires]) -> None:
        """Restore the state in which all averages and messages had arrived and none were used."""
        self._flights = {i: InFlight(means={i: mean}) for i, mean in landing.items()}
        self._flights |= {i: InFlight(lost=True) for i in lost}
        self._handles, self._arrived = {}, dict(arrived)
