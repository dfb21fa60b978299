"""Sign update: the sign of the averaged gradient or momentum, so that all elements move equally far."""

from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Policy, Update
from gossamer.core.parts import part, require


@final
@part("signs")
class Signs(Update):
    """Pass the sign of the averaged gradient to the optimizer: x -= lr sign(mean g), zero where the mean is zero.

    Elements of a gradient differ by powers of ten; here all move equally far, as under Adam with both betas 0. SGD's
    learning rate is far too large: a tenth to a thousandth of it is usual. Weight decay, momentum and the optimizer's other
    operations come after the sign.

    With `momentum` every rank sends m = momentum m + (1 - momentum) g in place of its gradient g: the sign of one batch's
    gradient is often wrong, the sign of an average over many batches rarely. The optimizer must then have no momentum. Nor may
    it with a memory that decays, since its residual is a momentum too. With majority votes it is Signum.

    Use: with plain SGD where gradients of layers differ by orders of magnitude, and with exchanges that preserve directions
    better than norms.

    Not for: adaptive optimizers, which divide by the gradient's size themselves; nor gradients that are noise in most
    elements: a small mean of large numbers of both signs moves the model the wrong way at full length.

    Wire: nothing of its own: the exchange sends the gradients.

    >>> import torch
    >>> from gossamer.core.rng import CounterRng
    >>> mean = Bucket.of({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> Signs().direction(mean, mean, {}, Context(0, 1, 1, CounterRng(0, 1, 0))).tolist()
    [1.0, -1.0, 0.0]

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, f"signs: momentum must lie in [0, 1), got {self.momentum}; 0.9 is usual")

    @property
    def sends_momentum(self) -> bool:
        return self.momentum > 0

    def policy(self, key: str) -> Policy:
        return "mean"

    def fits(self, binding: Binding) -> None:
        binding.refuse_momentum(self, self.momentum)
        if "fades" in binding.traits:
            binding.refuse_momentum(
                f"{self} of a memory that fades, which is a momentum,", 1.0, "error_feedback() in the recipe"
            )

    def sent(self, gradient: Bucket, state: State, scale: float) -> Tensor:
        if not self.momentum:
            return gradient.flat
        running = torch.mul(gradient.flat, (1 - self.momentum) / scale, out=gradient.new())
        if "running" in state:
            running.add_(state["running"], alpha=self.momentum)
        state["running"] = running
        return torch.mul(running, scale, out=gradient.flat)

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        return torch.sign(mean.flat, out=mean.new())
