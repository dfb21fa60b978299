"""EF21: send the difference between the gradient and its running estimate, through a biased codec."""

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
    """Each rank sends the compressed difference between its gradient and a running estimate h_i; the step uses their mean.

    v_i = (1 - eta) v_i + eta g_i, starting at v_i = g_i;  send v_i - h_i;  h_i += (the decoded part of mine);
    h += (the mean of the decoded parts);  the mean is the new h. No old gradient is added at another point, as under error
    feedback: with full gradients it converges to the exact optimum, around any codec that contracts, where error feedback
    stalls. It needs no care when the learning rate changes: h is a gradient, not a residual. It is DIANA's memory with rate 1,
    for biased codecs.

    `eta=1` is EF21, for full gradients; smaller values are EF21-SGDM, where averaging over steps reduces the gradients' noise.
    That average is a momentum: attach refuses an optimizer with momentum, unless you set `beside_momentum=True`.
    With `start="first"` each rank's first gradient is sent in full, once; else h grows from zero.

    Use: around top-k, on problems with exact or nearly exact gradients.

    Not for: minibatches with `eta=1`: their noise stays in h until later messages remove it.

    Wire: that of the exchange. Memory: two copies of the gradient; with eta below 1 three.

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
                    f"{self} with {type(optimizer).__name__}: ef21 sends an average of gradients, which is a momentum, and the "
                    "optimizer would average it again; use torch.optim.SGD with momentum=0 and a rate 1 / (1 - momentum) times as "
                    "large, or set beside_momentum=True to allow it"
                )

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        given = block if self.eta == 1 else block.like(self._smoothed(block, state))
        return (yield from self.learn(given, state, send, context, 1.0))

    def _smoothed(self, block: Bucket, state: State) -> Tensor:
        """The running average of this rank's gradients."""
        before = state.get("smoothed")
        new = block.new().copy_(block.flat)
        state["smoothed"] = new if before is None else torch.lerp(before, new, self.eta, out=new)
        return new
