"""What is made of an agreed gradient before the optimizer takes it."""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts.context import Context
from gossamer.core.contracts.entries import Policy
from gossamer.core.parts import Part

_ONE_MOMENTUM = (
    excludes(
        "adds momentum",
        because="{update} sends a momentum, and {memory} over {exchange} would make another one of it: leave that one out, with "
        "momentum=0.0 or error_feedback()",
    ),
    excludes(
        "follows rate",
        because="{update} sends a momentum, whose length does not follow the learning rate, and {memory} under {schedule} does; use "
        "error_feedback() and every_step()",
    ),
    excludes(
        "waits for few",
        because="{update} sends a momentum that all ranks share, and under {schedule} late ranks do not have it; use every_step()",
    ),
)
"""What an update that sends a momentum bars."""


class Update(Part):
    """What is made of an agreed gradient, before the optimizer takes it: after unscaling, and after the user's clipping.

    It may also say what travels in place of each rank's own gradient, as its momentum: the mean of that is what comes back.

    Law: equal means, models and states give equal directions, bit for bit; a gradient of zeros gives zeros. What is sent of
    one is as long as the loss scale says. State is assigned, never written into.
    """

    kind: ClassVar[str] = "update"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(directs=True, sends_momentum=self.sends_momentum)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        made = "{update} makes a direction of an agreed gradient, and under {schedule} there is none: use every_step()"
        terms = (requires("averages gradients", because=made),)
        return (*terms, *_ONE_MOMENTUM) if self.sends_momentum else terms

    @property
    def sends_momentum(self) -> bool:
        """True if a momentum travels in place of the gradient; then nobody else may have one."""
        return False

    @property
    def is_step(self) -> bool:
        """True if its directions are whole steps of an adaptive optimizer: one of Adam's family then takes them as they are,
        times its rate, and with its weight decay, decoupled.
        """
        return False

    def policy(self, key: str) -> Policy:
        return "equal"

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        """What travels in place of a gradient of this rank's, which is given away, and which a loss scaler has multiplied by
        `scale`, as it must what is returned.
        """
        return gradient.flat

    @abstractmethod
    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        """What the optimizer is given in place of the mean; `model` is a copy, and nobody else's."""


class StepsApart(Update):
    """An update that makes steps of a rank's own gradients too (`context.own`), under a schedule on which ranks meet now and
    then: what their steps came to is averaged, and all go on from one model.

    Law: after a meeting all ranks hold bit-equal models and momenta.
    """

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        because = "{update} makes steps of agreed gradients, or of own ones where ranks meet; under {schedule} they do not: use "
        twice = "{update} has a momentum, and {memory} over {exchange} adds another one: leave that one out, with momentum=0.0 or "
        return (
            requires("averages gradients", "meets", because=because + "every_step() or zero_one(1000)"),
            excludes("adds momentum", because=twice + "error_feedback()"),
        )

    @abstractmethod
    def gone(self, state: State) -> Tensor | None:
        """What this rank's own steps came to since ranks last met, given away and kept no more; None where it took none."""

    @abstractmethod
    def meet(self, start: Tensor, mean: Tensor, rate: float, state: State) -> Tensor:
        """The model that all go on from: `start`, which is given away, moved by the mean of what ranks' steps came to, at
        learning rates that add up to `rate`.
        """

    @abstractmethod
    def forget(self, state: State) -> None:
        """What ranks did since they last met is lost, and was given away: they go on from where they were."""
