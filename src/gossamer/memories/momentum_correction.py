"""Momentum correction: momentum is kept where the gradient is, and what is held back holds its momentum back."""

from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts import UNBALANCED, Context, Sender
from gossamer.core.parts import part, require
from gossamer.core.verbs import Program
from gossamer.memories.residual import ResidualMemory


@final
@part("momentum_correction")
class MomentumCorrection(ResidualMemory):
    """Each rank adds momentum to its own gradient, and sends of the sum what got through; what did stops there.

    u = m u + g;  v = v + u;  send v;  v -= (what got through of mine);  u = 0 where it did (`masking`).
    An element that is sent every hundred steps then moves the model as far as momentum would have in a hundred, where
    momentum behind the exchange would begin anew each time. Masking keeps what is old from moving it on. With momentum 0 it
    is error feedback. Around `topk` it is Deep Gradient Compression, around `count_sketch` Sketched-SGD.

    `clip` scales each parameter's gradient down to a length of clip / sqrt(N) before anything is added: what a residual keeps
    of a burst would come out later. Each by its own length, since they leave before all are there; without the loss scale.

    The optimizer must have no momentum of its own, or it would be added twice: attach refuses one that has (a DDP hook
    cannot see it). For parameters that travel whole, as biases do, masking would leave no momentum at all: send them by
    rule('ndim < 2', allreduce(fp32()), momentum_correction(masking=False)).

    Use: where one element in a hundred or fewer gets through, with plain SGD.

    Not for: Adam and its like, nor exchanges that say a little of everything, whose masks would be full: for those leave
    masking out, or use error_feedback().

    Wire: that of the exchange inside. Memory: two copies of the gradient.

    >>> MomentumCorrection(momentum=0.5)
    momentum_correction(momentum=0.5)

    Paper: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018; Ivkin et al., Communication-Efficient Distributed
    SGD with Sketching, NeurIPS 2019.
    """

    momentum: float = 0.9
    masking: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.momentum < 1,
            f"momentum_correction: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual",
        )
        require(
            self.clip is None or 0 < self.clip < float("inf"),
            f"momentum_correction: clip must be above 0, got {self.clip}; leave it out for gradients as they are",
        )

    @property
    def hands_on(self) -> bool:
        return True

    @property
    def gain(self) -> float:
        return 1 / (1 - self.momentum)

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(mends_bias=True, adds_momentum=self.momentum > 0)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        contracts = requires(
            "contracts",
            because="{memory} around {exchange} can diverge: the codec adds more than it leaves out; it needs no memory, so "
            "drop it and give the optimizer its momentum",
        )
        found = [contracts, excludes("part feedback", because=UNBALANCED)]
        if self.momentum:
            because = (
                "{memory} under {schedule}: differences of models hold the optimizer's momentum already; use error_feedback(), "
                "and slowmo() for momentum over rounds"
            )
            found.append(requires("averages gradients", because=because))
        if self.masking and self.momentum:
            because = (
                "{memory} around {exchange}: of every element something gets through, so that masking would stop all momentum at "
                "every step; use {memory.name}(masking=False), or an exchange that sends few elements, such as gather(topk()) or "
                "allreduce(count_sketch())"
            )
            found.append(requires("sparse", because=because))
        return tuple(found)

    def fits(self, binding: Binding) -> None:
        binding.refuse_momentum(self, self.momentum)

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        if self.clip is not None:
            block = block.like(_clipped(block, self.clip * context.scale / context.size**0.5))
        velocity = self._velocity(block, state) if self.momentum else None
        pending = block.new().copy_(block.flat if velocity is None else velocity)
        if "residual" in state:
            pending.add_(state["residual"])
        result = yield from send(block.with_older(pending), context._replace(feedback=1.0))
        if velocity is not None and self.masking:
            sent = block.new().zero_()
            result.add_sent(sent, 1.0)
            pending.sub_(sent)
            velocity.mul_(sent.eq_(0))
            # Of an element that is zero nothing can be seen to get through; nothing of it is left either.
            velocity.mul_(torch.ne(pending, 0, out=sent))
        else:
            result.add_sent(pending, -1.0)
        state["residual"] = pending
        if velocity is not None:
            state["velocity"] = velocity
        return result.mean

    def _velocity(self, block: Bucket, state: State) -> Tensor:
        velocity = block.new().copy_(block.flat)
        return velocity.add_(state["velocity"], alpha=self.momentum) if "velocity" in state else velocity


def _clipped(block: Bucket, longest: float) -> Tensor:
    """Each parameter's values, no longer than that."""
    out = block.new().copy_(block.flat)
    for _, values in block.like(out).tensors():
        length = torch.linalg.vector_norm(values, dtype=torch.float64)
        values.mul_((longest / length).clamp(max=1.0).to(values.dtype))  # of no length nothing is to be scaled
    return out
