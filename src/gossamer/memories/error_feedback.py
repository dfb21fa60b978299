"""Error feedback: what compression left out at this step is added to the next message."""

from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts import UNBALANCED, Context, Sender
from gossamer.core.parts import part, require
from gossamer.core.ranges import Range
from gossamer.core.verbs import Program
from gossamer.memories.residual import ResidualMemory


@final
@part("error_feedback")
class ErrorFeedback(ResidualMemory):
    """Add what compression left out to the next message (the residual).

    p = g + decay e;  send p;  e = p - (the decoded part of mine). The residual is the error of the rank's own message, not of
    the mean, so it stays bounded when ranks' data differ. With decay 1 nothing is lost: sum of means + mean residual = sum of
    mean gradients. An exchange that encodes the mean again (`scatter`) keeps the second error in the same way.

    It is independent of the loss scale. `units="update"` also follows the learning rate: an element held back under a large
    rate keeps that weight when it is sent under a small one (the form of the theory; for SGD with rate decays). With Adam,
    whose step does not scale with the gradient, keep `units="gradient"`.

    Use: around every biased codec, which leaves out the same things each time: top-k, low rank.

    Not for: noisy unbiased codecs, around which the residual can grow without bound, nor gossip and backup workers.

    Wire: that of the exchange. Memory: one copy of the gradient.

    >>> ErrorFeedback(units="update")
    error_feedback(units='update')

    Paper: Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    """

    hands_on: ClassVar[bool] = True

    units: Literal["gradient", "update"] = "gradient"
    decay: Annotated[float, Range(0.8, 1.0)] = 1.0

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, f"error_feedback: decay must lie in (0, 1], got {self.decay}; 1 loses nothing")

    @property
    def follows_rate(self) -> bool:
        return self.units == "update"

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(mends_bias=True, fades=self.decay < 1)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        around = (
            requires(
                "contracts",
                "bounds residual",
                because="{memory} around {exchange} can diverge: the codec adds more than it leaves out; it needs no memory, "
                "so drop it, or use diana() (with ternary(clip=0.0)), more bits or smaller buckets",
            ),
            excludes("part feedback", because=UNBALANCED),
        )
        if self.units == "gradient":
            return around
        plain = (
            "{memory} under {schedule}: differences of parameters already come in units of the update, whatever the "
            "learning rate; leave units out: {memory.name}()"
        )
        return (*around, requires("averages gradients", because=plain))

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        if self.rests(context):
            return (yield from self.pass_by(block, send, context))
        units = self.units_of(state, context)
        pending = self._pending(block, state, self.decay * units.now / units.before)
        # If the mean may not overwrite the bucket, the caller still reads the bucket after it has been sent.
        given = block.with_older(pending, drains=block.into is not None)
        result = yield from send(given, context._replace(rescale=units.rescale, feedback=1.0))
        if not result.drained:
            result.add_sent(pending, -1.0)
        state["residual"] = pending
        return result.mean

    def _pending(self, block: Bucket, state: State, weight: float) -> Tensor:
        residual = state.get("residual")
        if residual is None:
            return block.new().copy_(block.flat)  # the exchange may write the mean over its argument
        return torch.add(block.flat, residual, alpha=weight, out=block.new())
