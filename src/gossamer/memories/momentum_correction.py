"""Momentum correction: momentum on each rank before compression, with momentum factor masking."""

from typing import ClassVar, final

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
    """Each rank accumulates momentum before compression; sent elements reset their momentum and residual.

    u = m u + g;  v = v + u;  send v;  v -= (the decoded part of mine);  u = 0 where it is not zero (`masking`).
    An element that is sent every hundred steps then moves the model as far as momentum would in a hundred steps; momentum
    after the exchange would start again each time. Masking stops old momentum of sent elements. With momentum 0 it is error
    feedback. Around `topk` it is Deep Gradient Compression, around `count_sketch` Sketched-SGD.

    `clip` scales each parameter's gradient down to a norm of clip / sqrt(N) before it is accumulated, so that a burst does not
    stay in the residual. Each parameter has its own norm, since buckets are sent before all gradients are there; the norm is
    without the loss scale.

    Weight decay that an optimizer adds to gradients (SGD's, Adam's) enters each rank's gradient before clipping and momentum, as
    in Sketched-SGD's code: masking stops the momentum of both, and the optimum is that of the objective with the decay. Deep
    Gradient Compression's code keeps a separate momentum of the decay, which masking does not stop: there decay counts more.
    AdamW's decoupled decay stays in the optimizer. A DDP hook without the optimizer sees no decay: there it counts (1 - m) times.

    The optimizer must have no momentum of its own, or it would be added twice: attach refuses one that has (a DDP hook
    cannot see it). For parameters that are sent in full, such as biases, masking would leave no momentum at all: send them by
    rule('ndim < 2', allreduce(fp32()), momentum_correction(masking=False)).

    Use: where one percent of the elements or fewer are sent per step, with plain SGD.

    Not for: adaptive optimizers such as Adam, nor exchanges that send something of every element, since masking would then stop
    all momentum: with those use `masking=False`, or error_feedback().

    Wire: that of the exchange. Memory: two copies of the gradient.

    >>> MomentumCorrection(momentum=0.5)
    momentum_correction(momentum=0.5)

    Paper: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018; Ivkin et al., Communication-Efficient Distributed
    SGD with Sketching, NeurIPS 2019.
    """

    hands_on: ClassVar[bool] = True

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

    def owing(self, state: State) -> State:
        """Its momentum too: that of elements that were not sent is still to be added to the residual."""
        return super().owing(state) | ({"velocity": state["velocity"]} if "velocity" in state else {})

    def take_on(self, state: State, owed: State, times: float) -> None:
        super().take_on(state, owed, times)
        if "velocity" in owed:
            more = owed["velocity"] * times
            state["velocity"] = torch.add(state["velocity"], more) if "velocity" in state else more

    def let_go(self, state: State) -> None:
        super().let_go(state)
        state.pop("velocity", None)

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        if self.clip is not None:
            block = block.like(_clipped(block, self.clip * context.scale / context.size**0.5))
        velocity = block.new().copy_(block.flat) if self.momentum else None
        if velocity is not None and "velocity" in state:
            velocity.add_(state["velocity"], alpha=self.momentum)
        pending = block.new().copy_(block.flat if velocity is None else velocity)
        if "residual" in state:
            pending.add_(state["residual"])
        result = yield from send(block.with_older(pending), context._replace(feedback=1.0))
        if velocity is not None and self.masking:
            sent = block.new().zero_()
            result.add_sent(sent, 1.0)
            pending.sub_(sent)
            velocity.mul_(sent.eq_(0))
            # A zero element cannot be seen in `sent`; its residual is zero too.
            velocity.mul_(torch.ne(pending, 0, out=sent))
        else:
            result.add_sent(pending, -1.0)
        state["residual"] = pending
        if velocity is not None:
            state["velocity"] = velocity
        return result.mean


def _clipped(block: Bucket, longest: float) -> Tensor:
    """The bucket with each parameter's norm clipped to `longest`."""
    out = block.new().copy_(block.flat)
    for _, values in block.like(out).tensors():
        length = torch.linalg.vector_norm(values, dtype=torch.float64)
        values.mul_((longest / length).clamp(max=1.0).to(values.dtype))  # a norm of zero gives inf, clamped to 1
    return out
