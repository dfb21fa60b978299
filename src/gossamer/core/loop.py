"""What a schedule sees of the training: five small objects, and the buckets of the model.

A worker implements them for real training, a dry run fakes them. Each list holds one item per bucket.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, Memory, Update
from gossamer.core.verbs import Present, Program

Message = Callable[[Bucket, State, Context], Program[list[Tensor]]]
"""A program that sends a bucket's message to peers and returns the wires received. It gets the bucket as it is now,
its mixer's state and the context; its work before the first request is done at once."""

ErrorMeter = Callable[[Bucket, Callable[[Tensor, float], None]], None]
"""Records the compression error of a bucket that this rank sent; the function adds what was sent to a tensor."""


class BucketView(Protocol):
    """A bucket of the model and its state."""

    states: dict[str, State]

    @property
    def layout(self) -> Layout: ...
    @property
    def exchange(self) -> Exchange: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def narrow(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def fragment(self) -> int: ...
    @property
    def owned_by(self) -> int: ...
    def read(self) -> Tensor: ...
    def write(self, flat: Tensor) -> None: ...
    def pieces(self) -> list[Tensor]: ...
    def empty(self) -> Tensor: ...


class UntrainedTensors(Protocol):
    """What a model holds besides what is trained, by name: frozen parameters and buffers."""

    def tensors(self) -> Mapping[str, Tensor]: ...
    def take(self, values: Mapping[str, Tensor], giver: int) -> None: ...


class Averages(ABC):
    """Averages over ranks. They may be waited for steps after they were launched; what is in flight is kept by bucket, and
    saved in checkpoints.
    """

    @abstractmethod
    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging a bucket's gradient; `wait_gradients` waits for it. Uses memory and exchange, or `over` another
        exchange in place of both.
        """

    @abstractmethod
    def wait_gradients(self) -> Program[None]:
        """Wait for the averages that backward started; afterwards every gradient is the agreed mean."""

    @abstractmethod
    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        """Start averaging values that the caller gives up; `wait` returns the result later."""

    @abstractmethod
    def wait(self) -> Program[list[Tensor] | None]:
        """Wait for the launched average; None where any rank's values were not finite, and no memory was touched."""

    @abstractmethod
    def in_flight(self) -> bool:
        """True if an average was launched and its result has not been taken."""

    def of(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[list[Tensor] | None]:
        """Average through memory and exchange, or `over` another exchange in place of both; returns what `wait` does.

        The means may be written over the values.
        """
        yield from self.launch(values, over)
        return (yield from self.wait())

    @abstractmethod
    def local(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        """Average over an exchange among some ranks, without memory. Other ranks and the controller do not see it, and
        values that are not finite are left to the next average of all ranks.
        """

    @abstractmethod
    def residuals(self) -> list[Tensor]:
        """Each bucket's residual, as the step that plain SGD would take with it; zero where no memory keeps one.

        After the optimizer step, it is the residual after this step.
        """

    @abstractmethod
    def clear_residuals(self) -> None:
        """Reset the residuals to zero, after they were applied."""

    @abstractmethod
    def error_meter(self, step: int) -> ErrorMeter | None:
        """What records the compression error of what starts at this step; None if it is not to be measured."""


class Messages(ABC):
    """Messages to peers. They may be collected steps after they were posted."""

    @abstractmethod
    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        """Start sending every bucket's message to peers; `collect` returns the replies. `models` are the parameters, if known."""

    @abstractmethod
    def wait(self) -> Program[None]:
        """Wait for the posted messages, and keep the wires received for `collect`."""

    @abstractmethod
    def collect(self) -> Program[list[list[Tensor]]]:
        """Wait for the posted messages and return the wires received, per bucket; empty where nothing was posted."""

    @abstractmethod
    def arrived(self) -> list[list[Tensor]]:
        """The wires that were received and not yet collected."""

    @abstractmethod
    def has_posted(self) -> bool:
        """True if messages were posted and not yet collected."""

    @abstractmethod
    def has_come(self) -> bool:
        """True if `collect()` would not block, or if the messages are later than the deadline.
        Only for schedules that are `is_async`: the answer depends on timing.
        """


class OptimizerView(ABC):
    """The optimizer and the recipe's update."""

    @property
    @abstractmethod
    def rates(self) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""

    @property
    @abstractmethod
    def lrs(self) -> list[float]:
        """The learning rate of each bucket; that of the optimizer's first group, unless a part `follows_rate`."""

    @property
    @abstractmethod
    def gains(self) -> list[float]:
        """By how many times the learning rate each bucket moves under a constant gradient, with momentum summed up."""

    @property
    @abstractmethod
    def decays(self) -> list[float]:
        """The optimizer's weight decay of each bucket."""

    @property
    @abstractmethod
    def update(self) -> Update | None:
        """The recipe's update, if it has one."""

    @property
    @abstractmethod
    def update_states(self) -> list[State]:
        """The update's state, per bucket; after the optimizer step, that of after this step."""

    @abstractmethod
    def give(self, means: Sequence[Tensor], finite: bool = True, rates: Sequence[float] = ()) -> None:
        """Give the optimizer agreed gradients, and learning rates if they are not its own; without means, no parameter has a
        gradient. If they are not finite, no rank applies them.
        """

    @abstractmethod
    def reset(self) -> None:
        """Reset the optimizer's state for the parameters, counters included."""

    @abstractmethod
    def average(self, moments: Sequence[int] = ()) -> Program[None]:
        """Average the optimizer's buffers over all ranks, uncompressed; only the first or the second moments (1, 2) if asked."""


class Ranks(ABC):
    """The ranks that train, numbered among those that are present."""

    rank: int  # of this process
    size: int
    weights: Sequence[float]  # of each rank's step, 1 on average; empty where all are equal
    present: Present

    @property
    def weight(self) -> float:
        """The weight of this rank's step."""
        return self.weights[self.rank] if self.weights else 1.0

    @abstractmethod
    def regroup(self, present: Present, left: Sequence[int] = ()) -> None:
        """Continue with these ranks only, numbered among themselves; some have `left` in good order."""

    @abstractmethod
    def context(self, step: int) -> Context:
        """The context of this rank at any step, without a loss scale and without a memory.

        It draws the same numbers on all ranks that hold one model together: who meets whom is drawn here.
        """

    def whole_length(self, length: Tensor) -> Tensor:
        """The length of a vector of the whole model, of whose part on this rank it is given."""
        return length


class RecordView(ABC):
    """What metrics and the ledger are told."""

    @abstractmethod
    def closed(self, ranks: Sequence[int]) -> None:
        """Record that a step ended with the gradients of these ranks."""

    @abstractmethod
    def dropped(self, step: int) -> None:
        """Record that this rank's gradient of a step was not waited for."""

    @abstractmethod
    def aged(self, steps: int) -> None:
        """Record that the result just taken is from this rank's model of `steps` steps ago."""

    @abstractmethod
    def finite(self, rank: int | None, fine: bool | Tensor) -> bool | Tensor:
        """Record whether a rank's model (None: this one's) was finite when models met; one that is not counts once a step.

        Returns the same for the whole model, if this rank holds a shard of its own.
        """

    @abstractmethod
    def round_dropped(self) -> None:
        """Record that a round was dropped; resets optimizer state that is not finite."""


class Loop(ABC):
    """The training as a schedule sees it, for all buckets or some of them."""

    averages: Averages
    messages: Messages
    optimizer: OptimizerView
    ranks: Ranks
    record: RecordView
    live: dict[str, Any]  # what a schedule keeps between steps but not in checkpoints, such as running programs

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of the current step, 1 at the first; a schedule may set a later one."""

    @step.setter
    @abstractmethod
    def step(self, step: int) -> None: ...

    @property
    @abstractmethod
    def buckets(self) -> Sequence[BucketView]: ...

    @property
    @abstractmethod
    def untrained(self) -> UntrainedTensors | None:
        """What the model holds besides what is trained, where ranks that come are given the others'."""

    @abstractmethod
    def part(self, which: Iterable[int]) -> "Loop":
        """The same training restricted to some buckets."""

    @abstractmethod
    def counting(self, times: float) -> "Loop":
        """The same training, in which this rank's averages have `times` the weight."""

    @abstractmethod
    def assign(self, values: Sequence[Tensor]) -> None:
        """Write parameters that all ranks have agreed on, or that were pulled towards such."""

    @property
    def states(self) -> list[State]:
        """The schedule's own state, per bucket."""
        return [bucket.states["schedule"] for bucket in self.buckets]

    @property
    def mixing(self) -> list[State]:
        """The state of the schedule's mixer, per bucket."""
        return [bucket.states["mixer"] for bucket in self.buckets]

    def parameters(self) -> list[Tensor]:
        """Flat copies of the parameters."""
        return [bucket.read() for bucket in self.buckets]

    def blocks(self) -> list[Bucket]:
        """Buckets with copies of the parameters."""
        return [Bucket(bucket.read(), bucket.layout) for bucket in self.buckets]

    def write(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Write this rank's parameters; returns the values as stored: the same tensors, or rounded ones."""
        for bucket, value in zip(self.buckets, values, strict=True):
            bucket.write(value)
        return [bucket.read() if bucket.narrow else value for bucket, value in zip(self.buckets, values)]
