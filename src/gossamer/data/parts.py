"""Who takes which part of a batch: samples are cut among the ranks present, in proportion to their weights."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from gossamer.core.errors import GossamerError


class Parts(NamedTuple):
    """The weights of all who take samples, and which of them this rank is."""

    weights: tuple[float, ...]
    place: int


class TrainingRun(Protocol):
    """What an order asks of a run; `gossamer.Communicator` answers it."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        ...

    @property
    def accumulate(self) -> int:
        """Batches that a rank takes in one step."""
        ...

    @property
    def parts(self) -> Parts:
        """Who takes samples in the next step, with which weights."""
        ...

    @property
    def retries(self) -> int:
        """Steps that were begun, dropped, and are taken again: their numbers stay."""
        ...


def part(samples: int, weights: Sequence[float], place: int) -> tuple[int, int]:
    """Where the part of one begins and ends among so many samples: at least 1 each, the rest in proportion to the weights.

    All parts together are all samples, each once. Shares that `comm.share` has planned for so many samples come out exactly.

    >>> [part(12, (2.0, 1.0, 1.0), place) for place in range(3)]
    [(0, 6), (6, 9), (9, 12)]
    >>> [part(10, (1.0, 1.0, 1.0), place) for place in range(3)]
    [(0, 3), (3, 7), (7, 10)]
    """
    count = len(weights)
    if samples < count:
        raise GossamerError(
            f"a batch of {samples} sample(s) is too small for {count} ranks, of which each takes one at least: say samples={count} "
            "or more"
        )
    spare = [max(samples * weight / sum(weights) - 1, 0.0) for weight in weights]
    before = [0.0, *accumulate(spare)]
    shared = (samples - count) / before[-1] if before[-1] else 0.0
    return place + round(before[place] * shared), place + 1 + round(before[place + 1] * shared)
