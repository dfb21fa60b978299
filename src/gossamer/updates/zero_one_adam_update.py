"""0/1 Adam's update: Adam with a second moment updated by exact means only, and frozen during local steps."""

from math import inf
from typing import ClassVar, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Policy, StepsApart
from gossamer.core.parts import part, require
from gossamer.updates.momentum_step import corrected, fits, frozen, running


@final
@part("zero_one_adam_update")
class ZeroOneAdamUpdate(StepsApart):
    """Adam with a second moment updated by exact means only, and frozen at the first local step.

    While ranks average gradients: m = b1 m + (1 - b1) g, and where the mean g is exact v = b2 v + (1 - b2) g^2; the step is
    m^ / (sqrt(v^) + eps), each moment corrected for the number of its updates. A mean of signs would spoil v: the square of a
    sign says nothing of the gradient.

    During local steps each rank has its own momentum, over the frozen v: m_i = b1 m_i + (1 - b1) g_i, and u_i is the sum of
    lr m_i. At the end of a round U is the mean of u_i; the model becomes that of the last average minus U / (sqrt(v) + eps), and
    m = U / (the sum of the learning rates): the momentum that gives the same result in as many steps.

    Elements that never had a gradient in an exact mean do not move. The optimizer is AdamW with the same betas and eps, Adam
    without weight decay, or SGD without momentum; it applies the steps times its learning rate, and its weight decay is
    decoupled: it enters no momentum.

    Use: under zero_one(); the preset `zero_one_adam` combines both.

    Not for: schedules of local steps that average no momentum: they refuse it. Under every_step() it is Adam.

    Wire: nothing of its own. Memory: three copies of the model.

    >>> from gossamer.core.rng import CounterRng
    >>> mean = Bucket.of({"w": torch.tensor([0.5, -2.0, 0.0])})
    >>> ZeroOneAdamUpdate().direction(mean, mean, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    tensor([ 1., -1.,  0.])

    Paper: Lu, Li, Zhang, De Sa, He, Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023.
    """

    is_step: ClassVar[bool] = True

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    bias_correction: bool = True

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 < beta < 1, f"zero_one_adam_update: {name} must lie between 0 and 1, got {beta}")
        require(self.eps > 0, f"zero_one_adam_update: eps must be positive, got {self.eps}; 1e-8 is usual")

    def policy(self, key: str) -> Policy:
        return "mean" if key in ("m", "gone") else "equal"

    def fits(self, binding: Binding) -> None:
        fits(self, binding, (self.beta1, self.beta2), self.eps)

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        if context.own:
            return self._own_step(mean, state, context.lr)
        steps = int(state.get("steps", 0)) + 1
        state["steps"] = torch.tensor(steps)
        if not context.is_compressed:
            state["v"] = running(state.get("v"), mean.flat.square(), self.beta2)
            state["learned"] = torch.tensor(int(state.get("learned", 0)) + 1)
        divisor = self._divisor(mean.flat, state)
        state["m"] = m = running(state.get("m"), mean.flat, self.beta1).masked_fill_(divisor == inf, 0.0)
        return (corrected(m, self.beta1, steps) if self.bias_correction else m) / divisor

    def gone(self, state: State) -> Tensor | None:
        return state.pop("gone", None)

    def meet(self, start: Tensor, mean: Tensor, rate: float, state: State) -> Tensor:
        self._freeze(start, state)
        mean = mean.masked_fill(state["still"], 0.0)
        if rate:
            state["m"] = mean / rate
        return start.sub_(mean.div_(state["divisor"]))

    def forget(self, state: State) -> None:
        if "m" in state:
            state["m"] = torch.zeros_like(state["m"])

    def _divisor(self, like: Tensor, state: State) -> Tensor:
        """The divisor of momenta: sqrt(v) + eps, infinite where every exact mean was zero."""
        v = state["v"] if "v" in state else torch.zeros_like(like)
        if self.bias_correction and "learned" in state:
            v = corrected(v, self.beta2, int(state["learned"]))
        return frozen(v, self.eps)

    def _freeze(self, like: Tensor, state: State) -> None:
        """Freeze the divisor at a rank's first own step; when ranks meet, if it has skipped all of its own until then."""
        if "divisor" in state:
            return
        state["divisor"] = self._divisor(like, state)
        state["still"] = state["divisor"] == inf
        for key in ("v", "learned", "steps"):
            state.pop(key, None)

    def _own_step(self, gradient: Bucket, state: State, lr: float) -> Tensor:
        self._freeze(gradient.flat, state)
        m = running(state.get("m"), gradient.flat, self.beta1).masked_fill_(state["still"], 0.0)
        state["m"] = m
        state["gone"] = torch.add(state["gone"], m, alpha=lr) if "gone" in state else m * lr
        return m / state["divisor"]
