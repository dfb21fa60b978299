"""The contract of updates, which transform the agreed gradient before the optimizer step."""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts.context import Context, Policy
from gossamer.core.parts import Part

_ONE_MOMENTUM = (
    excludes(
        "adds momentum",
        because="{update} sends a momentum, and {memory} over {exchange} would add a second one: leave that one out, with "
        "momentum=0.0 or error_feedback()",
    ),
    excludes(
        "follows rate",
        because="{update} sends a momentum that does not scale with the learning rate, and {memory} under {schedule} needs that; use "
        "error_feedback() and every_step()",
    ),
    excludes(
        "waits for few",
        because="{update} sends a momentum that all ranks must share, and under {schedule} late ranks miss it; use every_step()",
    ),
)
"""The constraints of an update that sends a momentum."""


class Update(Part):
    """Transforms an agreed gradient before the optimizer step, after unscaling and the user's clipping.

    It may also send another tensor in place of each rank's gradient, such as a momentum; then the mean of that is what it gets.

    Law: equal means, models and states give equal directions, bit for bit; a gradient of zeros gives zeros. What is sent for
    one scales with the loss scale. State is assigned, never written into.
    """

    kind: ClassVar[str] = "update"
    # Its directions are whole steps of an adaptive optimizer: one of Adam's family then takes them as they are, times its rate,
    # and with its weight decay, decoupled.
    is_step: ClassVar[bool] = False

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(directs=True, sends_momentum=self.sends_momentum)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        made = "{update} needs an agreed gradient, and {schedule} averages none: use every_step()"
        terms = (requires("averages gradients", because=made),)
        return (*terms, *_ONE_MOMENTUM) if self.sends_momentum else terms

    @property
    def sends_momentum(self) -> bool:
        """True if it sends a momentum in place of the gradient; then no other part may have one."""
        return False

    def policy(self, key: str) -> Policy:
        return "equal"

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        """The tensor to send in place of this rank's gradient, which it may overwrite, and which a loss scaler has multiplied by
        `scale`; the result must be scaled alike.
        """
        return gradient.flat

    @abstractmethod
    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        """The direction that the optimizer gets in place of the mean; `model` is a copy that it may overwrite."""


class StepsApart(Update):
    """An update that also steps with a rank's own gradients (`context.own`), under a schedule on which ranks meet now and
    then: the sums of their steps are averaged, and all continue from one model.

    Law: after a meeting all ranks hold bit-equal models and momenta.
    """

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{update} needs agreed gradients, or own ones and meetings of all ranks; {schedule} has neither: use "
        twice = "{update} has a momentum, and {memory} over {exchange} adds a second one: leave that one out, with momentum=0.0 or "
        return (
            requires("averages gradients", "meets", because=because + "every_step() or zero_one(1000)"),
            excludes("adds momentum", because=twice + "error_feedback()"),
        )

    @abstractmethod
    def gone(self, state: State) -> Tensor | None:
        """Take the sum of this rank's own steps since the last meeting out of the state; None where it took none."""

    @abstractmethod
    def meet(self, start: Tensor, mean: Tensor, rate: float, state: State) -> Tensor:
        """The model after a meeting: `start`, which may be overwritten, moved by the mean of the ranks' summed steps, at
        learning rates that add up to `rate`.
        """

    @abstractmethod
    def forget(self, state: State) -> None:
        """Drop the steps since the last meeting: ranks continue from their state before them."""
