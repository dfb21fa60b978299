"""Events of a run, which a worker tells its listener and a ledger keeps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decision:
    """A controller's decision that is in force from this step on, in words."""

    step: int
    rank: int
    decision: str


@dataclass(frozen=True)
class Drop:
    """A gradient that was too late for its step, and its samples, if the training loop named them."""

    step: int
    rank: int
    dropped: list[Any]


@dataclass(frozen=True)
class Age:
    """A reply to this rank's model has arrived, `age` steps after the model was sent."""

    step: int
    rank: int
    age: int


@dataclass(frozen=True)
class Presence:
    """Ranks were lost, have come back, or have left in good order, as of this step."""

    step: int
    rank: int
    lost: list[int]
    back: list[int]
    left: list[int] = field(default_factory=list[int])


Event = Decision | Drop | Age | Presence
Listener = Callable[[Event], None]
