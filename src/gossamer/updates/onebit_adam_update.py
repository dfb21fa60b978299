"""1-bit Adam's update: Adam with a second moment frozen after a warm-up; then ranks send the momentum."""

from math import inf
from typing import final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context
from gossamer.core.parts import part, require
from gossamer.updates.momentum_step import MomentumStep, fits, frozen, moments


@final
@part("onebit_adam_update", sample="onebit_adam_update(2)")
class OneBitAdamUpdate(MomentumStep):
    """Adam for `warmup` steps, then momentum SGD divided by the frozen second moment.

    Before the freeze: m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, and the step is m^ / (sqrt(v^) + eps), both with bias
    correction. Afterwards each rank sends b1 m + (1 - b1) g_i, where m is the averaged momentum of the last step, so that
    ranks differ by (1 - b1) g_i only; the mean is the new m, and the step m / (sqrt(v^) + eps) with v^ of the freeze. So
    compression errors are errors of a momentum, of even size, and an exact exchange gives preconditioned momentum SGD.

    Elements that had no gradient before the freeze have v = 0, and never move. `v_floor` lets them move: v is at least so many
    times its tensor's mean. `bias_correction=False` corrects nothing, as DeepSpeed does, whatever its flag says: with betas of
    .9 and .999 its steps are up to 6.6 times as long at first, and a v frozen after 400 steps keeps them 1.7 times as long for
    ever. Only steps that are taken count, not those that a loss scaler skips.

    The optimizer is AdamW (or Adam) with the same betas and eps, or SGD without momentum: it applies the steps times its
    learning rate, with its decoupled weight decay. Its own state stays empty. After the freeze clipping acts on the momentum.

    Use: with switch_exchange(), which switches to signs at the freeze; the preset `onebit_adam` combines both.

    Not for: short warm-ups: the early freeze costs quality, not the signs. A v frozen while gradients are large makes all later
    steps too small.

    Wire: nothing of its own. Memory: two copies of the model, as Adam.

    >>> from gossamer.core.rng import CounterRng
    >>> mean = Bucket.of({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> OneBitAdamUpdate(100).direction(mean, mean, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    tensor([ 1., -1.,  0.])

    Paper: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021.
    """

    warmup: int
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    bias_correction: bool = True
    v_floor: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.warmup >= 1,
            f"onebit_adam_update: warmup must be at least 1 step, got {self.warmup}; 15 to 25 % of all are usual",
        )
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 < beta < 1, f"onebit_adam_update: {name} must lie between 0 and 1, got {beta}")
        require(self.eps > 0, f"onebit_adam_update: eps must be positive, got {self.eps}; 1e-8 is usual")
        require(self.v_floor >= 0, f"onebit_adam_update: v_floor must not be negative, got {self.v_floor}; 0 is none")

    def fits(self, binding: Binding) -> None:
        fits(self, binding, (self.beta1, self.beta2), self.eps)

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        if "divisor" in state:
            divisor = state["divisor"]
            state["m"] = mean.new().copy_(mean.flat).masked_fill_(state["still"], 0.0)
            return torch.div(state["m"], divisor, out=mean.new())
        m, v, steps = moments(mean, state, (self.beta1, self.beta2), self.bias_correction)
        divisor = v.sqrt().add_(self.eps)
        if steps >= self.warmup:
            state["divisor"] = kept = frozen(self._raised(v, mean), self.eps)
            state["still"] = kept == inf
            del state["v"], state["steps"]
        return m / divisor

    def _raised(self, v: Tensor, mean: Bucket) -> Tensor:
        """v, raised to at least `v_floor` times its tensor's mean."""
        if not self.v_floor:
            return v
        v = v.clone()
        for _, one in mean.like(v).tensors():
            one.clamp_(min=self.v_floor * one.mean())
        return v
