"""A rank's own gradient in full, beside what all ranks agreed on of everybody's."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts import UNBALANCED, Context, Sender
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.verbs import Program
from gossamer.memories.residual import ResidualMemory


@final
@part("own_gradient")
class OwnGradient(ResidualMemory):
    """Error feedback, whose ranks step with their own gradient at once and with the others' as it gets through.

    L: this rank's gradient.  A = L + E;  send A;  S: what got through of mine;  E = A - S;  G = sum of all S.
    The optimizer gets C / N, and C is by `mode`

    "partial"  G + (L - S): own numbers count once, be they sent or not. Under plain SGD x_i + (lr / N) E_i is equal on all
               ranks: models differ by what is not sent yet, and by no more.
    "sum"      G + L: own large numbers count twice.
    "errors"   G + E, and then E = 0: what was not sent is used at home and never sent. `reset_error=False` keeps E, and
               applies it again at every step; `allow_repeats=True` insists.
    "none"     G: error feedback, and nothing besides.

    Models part, so a schedule must bring them together: `resync()`. `units="update"` also follows the learning rate, as
    `error_feedback` does; the invariant then is x_i + E_i / N under any rate, E in steps.

    Use: around top-k at high drop rates, where plain dropping costs quality.

    Not for: "sum" and "errors" on ranks whose data differ: there "sum" ended at .77 of accuracy and "errors" at .83, where
    "partial" ended at .94. Clipping and optimizers see a gradient of this rank's own.

    Wire: that of the exchange inside. Memory: one copy of the gradient, and another while it travels.

    >>> OwnGradient("sum")
    own_gradient(mode='sum')

    Paper: Aji, Heafield, Bogoychev, Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network
    Training, EMNLP 2019.
    """

    mode: Annotated[Literal["partial", "sum", "errors", "none"], Choice("partial", "sum", "errors")] = "partial"
    units: Literal["gradient", "update"] = "gradient"
    reset_error: bool = True
    allow_repeats: bool = False

    def __post_init__(self) -> None:
        if self.reset_error:
            return
        require(
            self.mode == "errors",
            f"own_gradient: reset_error is about mode='errors', and the mode is {self.mode!r}; leave it out",
        )
        require(
            self.allow_repeats,
            "own_gradient: with reset_error=False a residual that is never sent would be applied again at every step; leave "
            "it out, or insist with allow_repeats=True",
        )

    @property
    def follows_rate(self) -> bool:
        return self.units == "update"

    @property
    def parts_models(self) -> bool:
        return self.mode != "none"

    @property
    def traits(self) -> frozenset[str]:
        exact = self.mode == "partial" and self.units == "update"
        return super().traits | those(mends_bias=True, owes_steps=exact)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        around = (
            requires(
                "contracts",
                because="{memory} around {exchange} can diverge: the codec adds more than it leaves out; it needs no memory, "
                "so drop it, or use gather(topk())",
            ),
            excludes("part feedback", because=UNBALANCED),
        )
        if not self.parts_models:
            plain = "{memory} keeps back gradients, and under {schedule} none are averaged; use error_feedback()"
            return (*around, requires("averages gradients", because=plain))
        alone = (
            "{memory} lets models part, and under {schedule} they would never meet again; use {memory} + resync(500)"
        )
        seen = "{controller} decides on gradients that all ranks have, and with {memory} each has its own; use error_feedback()"
        made = "{update} makes a direction of an agreed gradient, and with {memory} each rank has its own; use error_feedback()"
        return (
            *around,
            requires("resyncs", because=alone),
            excludes("control", because=seen),
            excludes("directs", because=made),
        )

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        if self.rests(context):
            return (yield from self.pass_by(block, send, context))
        rescale = self.units_of(state, context).rescale
        old = self._due(state, rescale)
        pending = block.new().copy_(block.flat) if old is None else torch.add(block.flat, old, out=block.new())
        # The mean may be written over what is given.
        own = block.new().copy_(block.flat) if self.mode == "sum" else None
        result = yield from send(block.with_older(pending), context._replace(rescale=rescale, feedback=1.0))
        result.add_sent(pending, -1.0)
        if self.mode == "partial":
            own = pending if old is None else torch.sub(pending, old, out=block.new())
        elif self.mode == "errors":
            own = pending
        state["residual"] = block.new().zero_() if self.mode == "errors" and self.reset_error else pending
        return result.mean if own is None else result.mean.add_(own, alpha=1 / context.size)

    def _due(self, state: State, weight: float) -> Tensor | None:
        residual = state.get("residual")
        return residual if residual is None or weight == 1 else residual * weight
