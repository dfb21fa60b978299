"""Each rank's own full gradient, combined with the compressed gradients of all ranks."""

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
    """Error feedback where each rank applies its own gradient at once, and other ranks' gradients when they are sent.

    L: this rank's gradient.  A = L + E;  send A;  S: the decoded part of mine;  E = A - S;  G = sum of all S.
    The optimizer gets C / N, where `mode` sets C:

    "partial"  G + (L - S): own elements count once, sent or not. Under plain SGD x_i + (lr / N) E_i is equal on all ranks:
               models differ by their residuals only.
    "sum"      G + L: own sent elements count twice.
    "errors"   G + E, and then E = 0: what was not sent is applied on this rank and never sent. `reset_error=False` keeps E, and
               applies it again at every step; it needs `allow_repeats=True`.
    "none"     G: plain error feedback.

    The ranks' models drift apart, so a schedule must average them: `resync()`. `units="update"` also follows the learning
    rate, as `error_feedback` does; then x_i + E_i / N is equal under any rate, with E in units of the update.

    Use: around top-k at high drop rates, where plain dropping costs quality.

    Not for: "sum" and "errors" on ranks whose data differ: there "sum" ended at an accuracy of .77 and "errors" at .83,
    "partial" at .94. Clipping and optimizers see a different gradient on each rank.

    Wire: that of the exchange. Memory: one copy of the gradient, and another while it is sent.

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
            f"own_gradient: reset_error is only for mode='errors', and the mode is {self.mode!r}; leave it out",
        )
        require(
            self.allow_repeats,
            "own_gradient: with reset_error=False a residual that is never sent is applied again at every step; leave "
            "it out, or set allow_repeats=True to allow it",
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
            plain = "{memory} works on gradients, and {schedule} averages none; use error_feedback()"
            return (*around, requires("averages gradients", because=plain))
        alone = "{memory} lets the ranks' models differ, and {schedule} never averages them; use {memory} + resync(500)"
        seen = "{controller} needs the same gradient on all ranks, and with {memory} each rank has its own; use error_feedback()"
        made = "{update} needs the same gradient on all ranks, and with {memory} each rank has its own; use error_feedback()"
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
        old = state.get("residual")
        if old is not None and rescale != 1:
            old = old * rescale
        pending = block.new().copy_(block.flat) if old is None else torch.add(block.flat, old, out=block.new())
        # The exchange may overwrite the bucket with the mean.
        own = block.new().copy_(block.flat) if self.mode == "sum" else None
        result = yield from send(block.with_older(pending), context._replace(rescale=rescale, feedback=1.0))
        result.add_sent(pending, -1.0)
        if self.mode == "partial":
            own = pending if old is None else torch.sub(pending, old, out=block.new())
        elif self.mode == "errors":
            own = pending
        state["residual"] = block.new().zero_() if self.mode == "errors" and self.reset_error else pending
        return result.mean if own is None else result.mean.add_(own, alpha=1 / context.size)
