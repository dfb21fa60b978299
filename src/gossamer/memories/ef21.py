"""EF21: send differences to what is known of a gradient, through a codec that leaves things out."""

from typing import Annotated, Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts import UNBALANCED, Context, Sender
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.core.ranges import Choice
from gossamer.core.verbs import Program
from gossamer.memories.learning import Learning


@final
@part("ef21")
class EF21(Learning):
    """Each rank sends what its gradient differs in from what is known of it; the model moves by all that is known.

    v_i = (1 - eta) v_i + eta g_i, from v_i = g_i on;  send v_i - h_i;  h_i += (what got through of mine);
    h += (the mean of what did);  the mean is the new h. Nothing that was left out comes back at another place, as it does
    under error feedback: with full gradients it goes on to the exact optimum, around any codec that contracts, where error
    feedback stalls. A change of the learning rate needs no care: h is a gradient, and no debt. It is DIANA's memory with
    rate 1, for codecs that are biased.

    `eta=1` is EF21, for full gradients; smaller ones are EF21-SGDM, whose average of gradients takes their noise away. That
    average is a momentum: attach refuses an optimizer that has one besides, unless `beside_momentum=True` insists.
    With `start="first"` each rank's first gradient travels in full, once; else h grows from zero.

    Use: around top-k, on problems whose gradients are exact or nearly so.

    Not for: minibatches with `eta=1`, whose noise stays in h until it is sent away again.

    Wire: that of the exchange inside. Memory: two copies of the gradient; with eta below 1 three.

    >>> EF21(eta=1.0)
    ef21(eta=1.0)

    Paper: Richtarik, Sokolov, Fatkhullin, EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
    NeurIPS 2021; Fatkhullin, Tyurin, Richtarik, Momentum Provably Improves Error Feedback!, NeurIPS 2023.
    """

    eta: Annotated[float, Choice(0.03, 0.1, 0.3, 1.0)] = 0.1
    start: Literal["zero", "first"] = "zero"
    beside_momentum: bool = False

    def __post_init__(self) -> None:
        require(
            0 < self.eta <= 1,
            f"ef21: eta must lie in (0, 1], got {self.eta}; 0.1 for minibatches, 1.0 for full gradients",
        )

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(mends_bias=True)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        contracts = requires(
            "contracts",
            because="{memory} around {exchange} can diverge: the codec adds more than it leaves out; use diana(), which is for "
            "unbiased codecs (with ternary(clip=0.0)), more bits or smaller buckets",
        )
        sizes = excludes(
            "own size",
            because="{memory} around {exchange}: the differences that it sends shrink until none is as large as what travels, and "
            "from then on nothing gets through, or too much; use error_feedback(), which adds them up, or gather(topk())",
        )
        around = contracts, sizes, excludes("part feedback", because=UNBALANCED)
        if self.eta == 1:
            return around
        because = (
            "{memory} under {schedule}: differences of models hold the optimizer's momentum already; use {memory.name}(eta=1.0), "
            "and slowmo() for momentum over rounds"
        )
        return (*around, requires("averages gradients", because=because))

    def fits(self, binding: Binding) -> None:
        for optimizer in binding.optimizers if self.eta < 1 and not self.beside_momentum else ():
            if any(group.get("momentum") for group in optimizer.param_groups):
                raise AttachError(
                    f"{self} with {type(optimizer).__name__}: what it sends is an average of gradients, which is momentum, and the "
                    "optimizer would average that again; use torch.optim.SGD with momentum=0 and a rate as much longer, "
                    "or insist with beside_momentum=True"
                )

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        given = block if self.eta == 1 else block.like(self._smoothed(block, state))
        return (yield from self.learn(given, state, send, context, 1.0))

    def _smoothed(self, block: Bucket, state: State) -> Tensor:
        """The average of this rank's gradients so far."""
        before = state.get("smoothed")
        new = block.new().copy_(block.flat)
        state["smoothed"] = new if before is None else torch.lerp(before, new, self.eta, out=new)
        return new
