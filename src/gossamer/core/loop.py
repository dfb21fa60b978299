"""The interface between a schedule and the worker that runs it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, Memory, Update
from gossamer.core.verbs import LateUpdate, OptimizerStep, Present, Program

Message = Callable[[Bucket, State, Context], Program[list[Tensor]]]
"""A program that sends a bucket's message to peers and returns the wires received. It gets the bucket as it is now,
its mixer's state and the context; its work before the first request is done at once."""


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
    def read(self) -> Tensor: ...
    def write(self, flat: Tensor) -> None: ...
    def pieces(self) -> list[Tensor]: ...
    def empty(self) -> Tensor: ...


class UntrainedTensors(Protocol):
    """What a model holds besides what is trained, by name: frozen parameters and buffers."""

    def tensors(self) -> Mapping[str, Tensor]: ...
    def take(self, values: Mapping[str, Tensor], giver: int) -> None: ...


class Host(Protocol):
    """What a loop needs of the worker that trains the model; `which` holds indices of buckets."""

    rank: int
    size: int
    step: int
    weights: Sequence[float]
    live: dict[str, Any]
    present: Present
    untrained: UntrainedTensors | None

    @property
    def buckets(self) -> Sequence[BucketView]: ...
    @property
    def rates(self) -> list[float]: ...
    def rate(self, index: int) -> float: ...
    def gain(self, index: int) -> float: ...
    def decay(self, index: int) -> float: ...
    @property
    def update(self) -> Update | None: ...
    def updates(self, which: Sequence[int]) -> list[State]: ...
    def context(self, index: int) -> Context: ...
    def plain_context(self, step: int) -> Context: ...
    def drop(self, step: int) -> None: ...
    def accept(self, ranks: Sequence[int]) -> None: ...
    def age(self, steps: int) -> None: ...
    def regroup(self, present: Present) -> None: ...
    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]: ...
    def average_gradients(self) -> Program[None]: ...
    def residuals(self, which: Sequence[int]) -> list[Tensor]: ...
    def settle(self, which: Sequence[int]) -> None: ...
    def deliver(self, means: Sequence[Tensor], finite: bool, rates: Sequence[float]) -> None: ...
    def launch(self, which: Sequence[int], values: Sequence[Tensor], over: Exchange | None) -> Program[None]: ...
    def local_average(
        self, which: Sequence[int], values: Sequence[Tensor], over: Exchange
    ) -> Program[list[Tensor]]: ...
    def land(self, which: Sequence[int]) -> Program[list[Tensor] | None]: ...
    def in_flight(self, which: Sequence[int]) -> bool: ...
    def post(self, which: Sequence[int], message: Message, models: Sequence[Tensor] | None) -> Program[None]: ...
    def collect(self, which: Sequence[int]) -> Program[list[list[Tensor]]]: ...
    def arrived(self, which: Sequence[int]) -> list[list[Tensor]]: ...
    def has_posted(self, which: Sequence[int]) -> bool: ...
    def has_come(self, which: Sequence[int]) -> bool: ...
    def wait(self, which: Sequence[int]) -> Program[None]: ...
    def agreed(self) -> None: ...
    def give_up(self) -> None: ...
    def reset_optimizer(self) -> None: ...
    def report_finite(self, rank: int | None, fine: bool | Tensor) -> None: ...
    def average_optimizer(self) -> Program[None]: ...
    def measures(self, step: int) -> bool: ...
    def measure(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None: ...


class Loop:
    """The training as a schedule sees it, for all buckets or some of them: each list holds one item per bucket.

    Averages are launched and waited for, messages to peers are posted and collected. Both may happen steps apart; what is in
    flight is kept by bucket, and saved in checkpoints.
    """

    def __init__(self, host: Host, which: Sequence[int] | None = None, counts: float = 1.0) -> None:
        self.host, self._which, self._counts = host, which, counts

    def part(self, which: Iterable[int]) -> "Loop":
        """The same training restricted to some buckets."""
        return Loop(self.host, [self.which[i] for i in which], self._counts)

    def counting(self, times: float) -> "Loop":
        """The same training, in which this rank's averages have `times` the weight."""
        return Loop(self.host, self._which, self._counts * times)

    @property
    def which(self) -> Sequence[int]:
        return range(len(self.host.buckets)) if self._which is None else self._which

    @property
    def places(self) -> list[BucketView]:
        return [self.host.buckets[i] for i in self.which]

    @property
    def step(self) -> int:
        """The number of the current step; 1 at the first."""
        return self.host.step

    @property
    def rank(self) -> int:
        return self.host.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.host.size

    @property
    def weights(self) -> Sequence[float]:
        """The weight of each rank's step, 1 on average; empty where all are equal."""
        return self.host.weights

    @property
    def weight(self) -> float:
        """The weight of this rank's step."""
        return self.weights[self.rank] if self.weights else 1.0

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each bucket; that of the optimizer's first group, unless a part `follows_rate`."""
        return [self.host.rate(i) for i in self.which]

    @property
    def gains(self) -> list[float]:
        """By how many times the learning rate each bucket moves under a constant gradient, with momentum summed up."""
        return [self.host.gain(i) for i in self.which]

    @property
    def decays(self) -> list[float]:
        """The optimizer's weight decay of each bucket."""
        return [self.host.decay(i) for i in self.which]

    @property
    def update(self) -> Update | None:
        """The recipe's update, if it has one."""
        return self.host.update

    @property
    def updates(self) -> list[State]:
        """The update's state, per bucket; after the optimizer step, that of after this step."""
        return self.host.updates(self.which)

    @property
    def states(self) -> list[State]:
        """The schedule's own state, per bucket."""
        return [p.states["schedule"] for p in self.places]

    @property
    def mixing(self) -> list[State]:
        """The state of the schedule's mixer, per bucket."""
        return [p.states["mixer"] for p in self.places]

    @property
    def live(self) -> dict[str, Any]:
        """What a schedule keeps between steps but not in checkpoints, such as running programs."""
        return self.host.live

    def blocks(self) -> list[Bucket]:
        """Buckets with copies of the parameters."""
        return [Bucket(p.read(), p.layout) for p in self.places]

    def parameters(self) -> list[Tensor]:
        """Flat copies of the parameters."""
        return [p.read() for p in self.places]

    def write(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Write this rank's parameters; returns the values as stored: the same tensors, or rounded ones."""
        self._write(values)
        return [p.read() if p.narrow else value for p, value in zip(self.places, values)]

    def assign(self, values: Sequence[Tensor]) -> None:
        """Write parameters that all ranks have agreed on, or that were pulled towards such."""
        self._write(values)
        self.host.agreed()

    def _write(self, values: Sequence[Tensor]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.write(value)

    # -- averages ----------------------------------------------------------------------------------------------------

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Start averaging a bucket's gradient; `average_gradients` waits for it. Uses memory and exchange, or `over` another
        exchange in place of both.
        """
        yield from self.host.send(self.which[index], flat, over)

    def average_gradients(self) -> Program[None]:
        """Wait for the averages that backward started; afterwards every gradient is the agreed mean."""
        yield from self.host.average_gradients()

    def average(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[list[Tensor] | None]:
        """Average through memory and exchange, or `over` another exchange in place of both; None where any rank's values were not
        finite, and no memory was touched.

        The means may be written over the values.
        """
        yield from self.launch(values, over)
        return (yield from self.land())

    def local_average(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        """Average over an exchange among some ranks, without memory. Other ranks and the controller do not see it, and
        values that are not finite are left to the next average of all ranks.
        """
        return (yield from self.host.local_average(self.which, values, over))

    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        """Start averaging values that the caller gives up; `land` returns the result later."""
        if self._counts != 1:
            values = [value.mul_(self._counts) for value in values]
        yield from self.host.launch(self.which, values, over)

    def land(self) -> Program[list[Tensor] | None]:
        return (yield from self.host.land(self.which))

    def in_flight(self) -> bool:
        """True if an average was launched and its result has not been taken."""
        return self.host.in_flight(self.which)

    # -- what did not get through ------------------------------------------------------------------------------------

    def residuals(self) -> list[Tensor]:
        """Each bucket's residual, as the step that plain SGD would take with it; zero where no memory keeps one.

        After the optimizer step, it is the residual after this step.
        """
        return self.host.residuals(self.which)

    def settle(self) -> None:
        """Reset the residuals to zero, after they were applied."""
        self.host.settle(self.which)

    # -- messages ----------------------------------------------------------------------------------------------------

    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        """Start sending every bucket's message to peers; `collect` returns the replies. `models` are the parameters, if known."""
        yield from self.host.post(self.which, message, models)

    def collect(self) -> Program[list[list[Tensor]]]:
        """Wait for the posted messages and return the wires received, per bucket; empty where nothing was posted."""
        return (yield from self.host.collect(self.which))

    def arrived(self) -> list[list[Tensor]]:
        """The wires that were received and not yet collected."""
        return self.host.arrived(self.which)

    def has_posted(self) -> bool:
        """True if messages were posted and not yet collected."""
        return self.host.has_posted(self.which)

    def has_come(self) -> bool:
        """True if `collect()` would not block, or if the messages are later than the deadline.
        Only for schedules that are `is_async`: the answer depends on timing.
        """
        return self.host.has_come(self.which)

    def wait(self) -> Program[None]:
        """Wait for the posted messages, and keep the wires received for `collect`."""
        yield from self.host.wait(self.which)

    def report_finite(self, rank: int | None, fine: bool | Tensor) -> None:
        """Whether a rank's model (None: this one's) was finite when models met; one that is not counts as `spoilt` once a step."""
        self.host.report_finite(rank, fine)

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        """Reset the optimizer's state for the parameters, counters included."""
        self.host.reset_optimizer()

    def average_optimizer(self) -> Program[None]:
        """Average the optimizer's buffers over all ranks, uncompressed."""
        yield from self.host.average_optimizer()

    # -- steps that do not wait for all ----------------------------------------------------------------------------------

    @property
    def rates(self) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""
        return self.host.rates

    def context(self, step: int) -> Context:
        """The context of this rank at any step, without a loss scale and without a memory."""
        return self.host.plain_context(step)

    def deliver(self, mean: Tensor, finite: bool, rates: Sequence[float]) -> None:
        """Give the optimizer the agreed gradient and these learning rates; if it is not finite, no rank applies it."""
        self.host.deliver([mean], finite, rates)

    def hand_over(self, means: Sequence[Tensor] | None) -> None:
        """Give the optimizer these means at this step; with None, no parameter has a gradient."""
        self.host.deliver(means or [], True, self.host.rates)

    def missed(self, update: LateUpdate) -> Program[None]:
        """Apply the update of a step that ended without this rank, and count it."""
        yield OptimizerStep(update)
        self.host.step += 1

    def count_on(self, step: int) -> None:
        """Set the current step's number to a later one: this rank takes fewer steps than the ranks count together."""
        self.host.step = step

    def drop(self, step: int) -> None:
        """Record that this rank's gradient of a step was not waited for."""
        self.host.drop(step)

    def accept(self, ranks: Sequence[int]) -> None:
        """Record that a step ended with the gradients of these ranks."""
        self.host.accept(ranks)

    def age(self, steps: int) -> None:
        """Record that the result just taken is from this rank's model of `steps` steps ago."""
        self.host.age(steps)

    @property
    def present(self) -> Present:
        """The ranks that take part now."""
        return self.host.present

    @property
    def untrained(self) -> UntrainedTensors | None:
        """What the model holds besides what is trained, where whoever comes to others is given theirs."""
        return self.host.untrained

    def regroup(self, present: Present) -> None:
        """Continue with these ranks only, numbered among themselves."""
        self.host.regroup(present)

    def catch_up(self, step: int) -> None:
        """Continue at the step of the other ranks."""
        self.host.step = step

    def give_up(self) -> None:
        """Drop a round: reset optimizer state that is not finite."""
        self.host.give_up()

    def measures(self, step: int) -> bool:
        """True if the compression error of what starts at this step is to be measured."""
        return self.host.measures(step)

    def measure(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None:
        """Record the compression error of a bucket that this rank sent."""
        self.host.measure(block, add_sent)
