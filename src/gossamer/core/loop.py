"""The loop: a training as schedules see it, and what that asks of whoever trains the model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, Layout, State
from gossamer.core.contracts import Context, Exchange, Memory, Update
from gossamer.core.verbs import LateUpdate, OptimizerStep, Present, Program

Message = Callable[[Bucket, State, Context], Program[list[Tensor]]]
"""What a block says to peers: a program that sends, and returns the wires that came. It is given the block as it is now,
what its mixer keeps, and the context; whatever it does before it first asks the network is done at once."""


class BucketView(Protocol):
    """A block of the model, and what is kept about it."""

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


class Host(Protocol):
    """Whoever trains a model, as a loop needs it; `which` counts the model's blocks."""

    rank: int
    size: int
    step: int
    weights: Sequence[float]
    live: dict[str, Any]
    present: Present

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
    """The training that a schedule drives, or that of some blocks: a list holds one item for each of them.

    Averages are launched and land, messages to peers are posted and collected. Both may happen steps apart; what is on its
    way is kept by block, and travels with a checkpoint.
    """

    def __init__(self, host: Host, which: Sequence[int] | None = None, counts: float = 1.0) -> None:
        self.host, self._which, self._counts = host, which, counts

    def part(self, which: Iterable[int]) -> "Loop":
        """The same training, of some of these blocks: every schedule of a whole model works on them."""
        return Loop(self.host, [self.which[i] for i in which], self._counts)

    def counting(self, times: float) -> "Loop":
        """The same training, in which what this rank launches counts so many times, besides what its data weigh."""
        return Loop(self.host, self._which, self._counts * times)

    @property
    def which(self) -> Sequence[int]:
        return range(len(self.host.buckets)) if self._which is None else self._which

    @property
    def places(self) -> list[BucketView]:
        return [self.host.buckets[i] for i in self.which]

    @property
    def step(self) -> int:
        """1 at the first optimizer step."""
        return self.host.step

    @property
    def rank(self) -> int:
        return self.host.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.host.size

    @property
    def weights(self) -> Sequence[float]:
        """What each rank's step counts, 1 on average; none where all count alike."""
        return self.host.weights

    @property
    def weight(self) -> float:
        """What this rank's step counts."""
        return self.weights[self.rank] if self.weights else 1.0

    @property
    def lrs(self) -> list[float]:
        """The learning rate of each block's parameters; of the optimizer's first group, unless a part `follows_rate`."""
        return [self.host.rate(i) for i in self.which]

    @property
    def gains(self) -> list[float]:
        """How many times its learning rate each block moves in the end under a gradient that stays: momentum adds up."""
        return [self.host.gain(i) for i in self.which]

    @property
    def decays(self) -> list[float]:
        """By how much of itself, times the learning rate, the optimizer shrinks each block at a step."""
        return [self.host.decay(i) for i in self.which]

    @property
    def update(self) -> Update | None:
        """What the recipe makes of gradients."""
        return self.host.update

    @property
    def updates(self) -> list[State]:
        """What that keeps, per block; once the optimizer has descended, after this step."""
        return self.host.updates(self.which)

    @property
    def states(self) -> list[State]:
        """The schedule's own state, per block."""
        return [p.states["schedule"] for p in self.places]

    @property
    def mixing(self) -> list[State]:
        """What the schedule's mixer keeps, per block."""
        return [p.states["mixer"] for p in self.places]

    @property
    def live(self) -> dict[str, Any]:
        """What a schedule keeps beside the steps and no checkpoint holds: a program that is under way."""
        return self.host.live

    def blocks(self) -> list[Bucket]:
        """Copies of the parameters, and where they lie."""
        return [Bucket(p.read(), p.layout) for p in self.places]

    def parameters(self) -> list[Tensor]:
        """Copies of the parameters, flat."""
        return [p.read() for p in self.places]

    def write(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Write this rank's parameters; returns them as they were taken: the very tensors, or what rounding left of them."""
        self._write(values)
        return [p.read() if p.narrow else value for p, value in zip(self.places, values)]

    def assign(self, values: Sequence[Tensor]) -> None:
        """Write parameters on which all ranks have agreed, or which they pull towards what they agreed on."""
        self._write(values)
        self.host.agreed()

    def _write(self, values: Sequence[Tensor]) -> None:
        for place, value in zip(self.places, values, strict=True):
            place.write(value)

    # -- averages ----------------------------------------------------------------------------------------------------

    def send(self, index: int, flat: Tensor, over: Exchange | None = None) -> Program[None]:
        """Put a block's gradient on its way, for `average_gradients` to join; through memory and exchange, or `over` another
        exchange and past them.
        """
        yield from self.host.send(self.which[index], flat, over)

    def average_gradients(self) -> Program[None]:
        """Join what backward started; afterwards every gradient is the agreed mean."""
        yield from self.host.average_gradients()

    def average(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[list[Tensor] | None]:
        """Through memory and exchange, or `over` another exchange and past them; None where any rank's values were not
        finite, and no memory was touched.

        The values are given away: the means may be written over them.
        """
        yield from self.launch(values, over)
        return (yield from self.land())

    def local_average(self, values: Sequence[Tensor], over: Exchange) -> Program[list[Tensor]]:
        """Over an exchange among a few ranks, past memory. The others hear nothing of it, so no controller does either, and
        what is not finite is left to the next average of all.
        """
        return (yield from self.host.local_average(self.which, values, over))

    def launch(self, values: Sequence[Tensor], over: Exchange | None = None) -> Program[None]:
        """Start averaging what is given away; `land` gets the result later."""
        if self._counts != 1:
            values = [value.mul_(self._counts) for value in values]
        yield from self.host.launch(self.which, values, over)

    def land(self) -> Program[list[Tensor] | None]:
        return (yield from self.host.land(self.which))

    def in_flight(self) -> bool:
        """Whether an average has been launched and has not landed."""
        return self.host.in_flight(self.which)

    # -- what did not get through ------------------------------------------------------------------------------------

    def residuals(self) -> list[Tensor]:
        """What each block's memory owes, as the step that plain SGD would take with it; zero where nothing is kept.

        Once the optimizer has descended, it is what is owed after this step.
        """
        return self.host.residuals(self.which)

    def settle(self) -> None:
        """What was owed has been paid: memories start from zero."""
        self.host.settle(self.which)

    # -- messages ----------------------------------------------------------------------------------------------------

    def post(self, message: Message, models: Sequence[Tensor] | None = None) -> Program[None]:
        """Start what every block says to peers; `collect` gets what came. `models` are the blocks, where they are known."""
        yield from self.host.post(self.which, message, models)

    def collect(self) -> Program[list[list[Tensor]]]:
        """Wait for what was posted: the wires that came, for each block; none where nothing was posted."""
        return (yield from self.host.collect(self.which))

    def arrived(self) -> list[list[Tensor]]:
        """The wires that have come and have not been collected."""
        return self.host.arrived(self.which)

    def has_posted(self) -> bool:
        """Whether something was posted and has not been collected."""
        return self.host.has_posted(self.which)

    def has_come(self) -> bool:
        """Whether something was posted, and to collect it would be to wait for nobody, or for longer than a deadline already.
        For who goes at its own pace only: the answer is a matter of time.
        """
        return self.host.has_come(self.which)

    def wait(self) -> Program[None]:
        """Wait for what was posted, and keep what came for `collect`."""
        yield from self.host.wait(self.which)

    def report_finite(self, rank: int | None, fine: bool | Tensor) -> None:
        """Whether a rank's model (None: this one's) was finite when models met; one that is not counts as `spoilt` once a step."""
        self.host.report_finite(rank, fine)

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def reset_optimizer(self) -> None:
        """Make the optimizer forget all it knows of the parameters, its counters too."""
        self.host.reset_optimizer()

    def average_optimizer(self) -> Program[None]:
        """Average the optimizer's buffers over all ranks, densely."""
        yield from self.host.average_optimizer()

    # -- steps that do not wait for all ----------------------------------------------------------------------------------

    @property
    def rates(self) -> list[float]:
        """The learning rate of each of the optimizer's groups."""
        return self.host.rates

    def context(self, step: int) -> Context:
        """Where I sit at a step that need not be the one I compute: in no units, and with no memory around."""
        return self.host.plain_context(step)

    def deliver(self, mean: Tensor, finite: bool, rates: Sequence[float]) -> None:
        """The step's agreed gradient, for the optimizer to take with these rates; where it is not finite, nobody takes it."""
        self.host.deliver([mean], finite, rates)

    def hand_over(self, means: Sequence[Tensor] | None) -> None:
        """These means are what the optimizer takes at this step; without any, no parameter has a gradient."""
        self.host.deliver(means or [], True, self.host.rates)

    def missed(self, update: LateUpdate) -> Program[None]:
        """A step ended without this rank: the optimizer makes up for it, and the next step is counted."""
        yield OptimizerStep(update)
        self.host.step += 1

    def count_on(self, step: int) -> None:
        """The step under way has a later number: this rank takes fewer steps than the ranks count together."""
        self.host.step = step

    def drop(self, step: int) -> None:
        """This rank's gradient of a step was not waited for."""
        self.host.drop(step)

    def accept(self, ranks: Sequence[int]) -> None:
        """A step ended that is made of the gradients of these ranks."""
        self.host.accept(ranks)

    def age(self, steps: int) -> None:
        """What has landed was made of this rank's model as it was so many steps ago."""
        self.host.age(steps)

    @property
    def present(self) -> Present:
        """Who is there."""
        return self.host.present

    def regroup(self, present: Present) -> None:
        """These are there from now on, and ranks are counted among them."""
        self.host.regroup(present)

    def catch_up(self, step: int) -> None:
        """This rank goes on where others are."""
        self.host.step = step

    def give_up(self) -> None:
        """A round came to nothing: what the optimizer keeps that is not finite goes with it."""
        self.host.give_up()

    def measures(self, step: int) -> bool:
        """Whether the error is to be measured of what starts at this step."""
        return self.host.measures(step)

    def measure(self, block: Bucket, add_sent: Callable[[Tensor, float], None]) -> None:
        """Note what got lost of a block that this rank gave."""
        self.host.measure(block, add_sent)
