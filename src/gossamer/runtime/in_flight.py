"""Averages and messages in flight, by bucket, and the state changes that wait for the optimizer step."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gossamer.core.bucket import PendingState
from gossamer.core.contracts import Exchange
from gossamer.core.verbs import Handle
from gossamer.recipe import Recipe

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

    def breaks(self) -> None:
        """Forget what has arrived: all of these averages run again."""
        self.broken, self.handles, self.drafts, self.means = True, {}, [], {}


@dataclass
class PendingCommit:
    """The state changes of an averaged gradient, to commit after the optimizer step."""

    drafts: list[PendingState] = field(default_factory=list[PendingState])
    decided: Recipe | None = None
    words: list[str] = field(default_factory=list[str])  # that say what was decided

    # Buckets for which they also agree again on what is equal on all ranks, after a change of members.
    renewed: set[int] = field(default_factory=set[int])

    def commit(self) -> None:
        for draft in self.drafts:
            draft.commit()

    def settle(self) -> None:
        """Commit the pending states after the optimizer step; the controller's decision waits for the end of the step."""
        self.commit()
        self.drafts = self.drafts[:0]


class InFlightTable:
    """The averages and messages in flight; each bucket has at most one of each."""

    def __init__(self) -> None:
        self._flights = dict[int, InFlight]()
        self.posted = dict[int, Handle[Wires]]()  # messages that are waited for
        self.arrived = dict[int, Wires]()  # wires that were received and not collected yet

    @property
    def averages(self) -> list[InFlight]:
        return list(dict.fromkeys(self._flights.values()))

    @property
    def handles(self) -> list[Handle[Any]]:
        """What is waited for: averages, in the order of their launches, then messages."""
        return [handle for flight in self.averages for handle in flight.handles.values()] + [*self.posted.values()]

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
        """A description of the averages that have to run again, for other ranks: buckets, and the step of their launch."""
        return [([*flight.values], flight.step) for flight in self.broken]

    def drop(self, flight: InFlight) -> None:
        self._flights = {i: each for i, each in self._flights.items() if each is not flight}

    def drop_messages(self) -> None:
        self.posted, self.arrived = {}, {}

    def landing(self) -> dict[int, Tensor]:
        """The means that have arrived, by bucket."""
        return {i: f.means[i] for i, f in self._flights.items() if not f.lost and i in f.means}

    def restore(self, landing: dict[int, Tensor], lost: Iterable[int], arrived: dict[int, Wires]) -> None:
        """Restore the state in which all averages and messages had arrived and none were used."""
        self._flights = {i: InFlight(means={i: mean}) for i, mean in landing.items()}
        self._flights |= {i: InFlight(lost=True) for i in lost}
        self.posted, self.arrived = {}, dict(arrived)
