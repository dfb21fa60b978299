"""What the training loop does in a dry run, in its order: events, and the requests of the programs that it starts."""

from typing import NamedTuple

from gossamer.core.contracts import Exchange
from gossamer.core.loop import Message
from gossamer.core.verbs import Verb


class AverageRequest(NamedTuple):
    """An average of some buckets; through the schedule's own exchange `over`, if given."""

    which: tuple[int, ...]
    over: Exchange | None = None


class MessageRequest(NamedTuple):
    """Messages of some buckets to peers."""

    which: tuple[int, ...]
    message: Message


class StateRequest(NamedTuple):
    """An average of the optimizer's state, or only of its first or second moments (1, 2)."""

    moments: tuple[int, ...] = ()

    def buffers(self, momenta: int) -> int:
        """The averaged buffers of a parameter, where an optimizer keeps `momenta`."""
        return sum(moment <= momenta for moment in self.moments) if self.moments else momenta


Request = AverageRequest | MessageRequest | StateRequest | Verb


class Ready(NamedTuple):
    """A bucket's gradient is complete."""

    bucket: int


class Launch(NamedTuple):
    """A program starts on a comm thread: its requests, one after the other. The list may fill until it is waited for."""

    key: int
    lane: str
    requests: list[Request]


class Wait(NamedTuple):
    """The training loop waits for started programs."""

    keys: tuple[int, ...]


class Busy(NamedTuple):
    """The training loop computes besides forward, backward and optimizer: what the schedule itself does."""

    seconds: float


class BackwardEnds(NamedTuple):
    """The rest of the backward pass ends."""


class OptimizerSteps(NamedTuple):
    """The optimizer steps."""


class StepEnds(NamedTuple):
    """A training step ends."""


Event = Ready | Launch | Wait | Busy | BackwardEnds | OptimizerSteps | StepEnds
