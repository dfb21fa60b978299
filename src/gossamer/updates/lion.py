"""Lion's update, each rank with a momentum of its own: ranks send signs."""

from typing import Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Policy, Update
from gossamer.core.parts import part, require
from gossamer.updates.momentum_step import running


@final
@part("lion")
class Lion(Update):
    """Distributed Lion: each rank sends the sign of its own momentum and gradient, and the model moves by their vote or mean.

    u_i = sign(b1 m_i + (1 - b1) g_i);  m_i = b2 m_i + (1 - b2) g_i;  x -= lr (U + wd x) with U = sign(sum of u_i)
    (`combine="vote"`), or the mean of u_i ("mean"). An element without a gradient so far sends 0, and stays. A tie, as among two
    ranks that oppose each other, is 0 as well: the element stands still. An exchange may break it: `sign('one')` writes no zeros, and
    tosses a coin for each. With one rank, or equal data on all ranks, it is Lion.

    The momentum is each rank's own: it never travels, and each rank saves its own. The optimizer is SGD without momentum; its
    weight decay is Lion's, decoupled. Clipping acts on votes before they are signs again, which changes nothing; under "mean" it
    shortens the step, so leave it out.

    Use: the preset `distributed_lion` combines it with votes of 1.6 bits.

    Not for: the learning rates of AdamW: every element moves by a whole learning rate, so take a third to a tenth.

    Wire: nothing of its own: the exchange sends numbers that are -1, 0 or 1. Memory: one copy of the model.

    >>> from gossamer.core.rng import CounterRng
    >>> state, gradient = {}, Bucket.of({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> Lion().sent(gradient, state, 1.0)
    tensor([ 1., -1.,  0.])
    >>> Lion().direction(gradient, gradient, state, Context(0, 1, 1, CounterRng(0, 1, 0))).tolist()
    [1.0, -1.0, 0.0]

    Paper: Chen et al., Symbolic Discovery of Optimization Algorithms, NeurIPS 2023; Liu et al., Communication Efficient
    Distributed Training with Distributed Lion, NeurIPS 2024.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    combine: Literal["vote", "mean"] = "vote"

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= beta < 1, f"lion: {name} must lie in [0, 1), got {beta}")

    @property
    def sends_momentum(self) -> bool:
        return True

    def policy(self, key: str) -> Policy:
        return "mean"

    def fits(self, binding: Binding) -> None:
        binding.refuse_momentum(self, 1.0, "signs() in the recipe has none of its own")

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        g = gradient.flat.div_(scale)
        between = running(state.get("m"), g, self.beta1)
        state["m"] = running(state.get("m"), g, self.beta2)
        signs = torch.sign(between, out=gradient.flat)
        return signs.add_(between.sub_(between)).mul_(scale)  # what is not finite has a sign, and must not look finite

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        if self.combine == "mean":
            return mean.new().copy_(mean.flat)
        return torch.sign(mean.flat, out=mean.new())
