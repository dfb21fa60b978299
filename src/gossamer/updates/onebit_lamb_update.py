"""1-bit LAMB's update: LAMB with second moment and trust ratios frozen after a warm-up; then ranks send the momentum."""

from math import inf
from typing import Literal, final

import torch
from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context
from gossamer.core.errors import AttachError
from gossamer.core.parts import part, require
from gossamer.updates.momentum_step import MomentumStep, corrected, fits, frozen, moments, running


@final
@part("onebit_lamb_update", sample="onebit_lamb_update(2)")
class OneBitLambUpdate(MomentumStep):
    """LAMB for `warmup` steps, then with its second moment frozen and each tensor's frozen trust ratio times r.

    Before the freeze: u = m^ / (sqrt(v^) + eps) + wd x, and the step is c u, with c = |x| / |u| of each tensor, within
    [min_coeff, max_coeff]; the frozen c is its running mean. Afterwards each rank sends b1 m + (1 - b1) g_i, as under
    onebit_adam_update(). The new mean gives the averaged gradient, g~ = (m' - b1 m) / (1 - b1), and so a fresh second moment,
    which is no divisor: r is the largest ratio of a tensor's frozen sqrt(v) to its fresh one, within `ratio`, and changes by at
    most a share `ratio_step` per step. `coefficients="frozen"` leaves r at 1. One outlier sets a tensor's r.

    Each tensor has its own scale on the wire, so momenta of different tensors need no scaling before they are sent.

    The optimizer is AdamW (or Adam) with the same betas and eps, or SGD without momentum, and has no weight decay: LAMB's decay
    is part of the trust ratio, so set it here. For tensors sharded over ranks the norms are those of the shards.

    Use: with switch_exchange(); the preset `onebit_lamb` combines both. For large batches, where LAMB is used.

    Not for: short warm-ups, as onebit_adam_update().

    Wire: nothing of its own. Memory: three copies of the model.

    >>> from gossamer.core.rng import CounterRng
    >>> mean = Bucket.of({"w": torch.tensor([0.5, -2.0, 0.0]), "b": torch.tensor([1.0])})
    >>> model = Bucket.of({"w": torch.tensor([3.0, 4.0, 0.0]), "b": torch.tensor([0.5])})
    >>> OneBitLambUpdate(100).direction(mean, model, {}, Context(0, 1, 1, CounterRng(0, 1, 0)))
    tensor([ 3.5355, -3.5355,  0.0000,  0.5000])

    Paper: Li, Awan, Tang, Rajbhandari, He, 1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
    Convergence Speed, 2021.
    """

    warmup: int
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coefficients: Literal["adaptive", "frozen"] = "adaptive"
    coeff_beta: float = 0.9
    ratio: tuple[float, float] = (0.5, 4.0)
    ratio_step: float = 0.1
    bias_correction: bool = True

    def __post_init__(self) -> None:
        require(
            self.warmup >= 1,
            f"onebit_lamb_update: warmup must be at least 1 step, got {self.warmup}; 15 to 25 % of all are usual",
        )
        for name in ("beta1", "beta2", "coeff_beta"):
            beta = getattr(self, name)
            require(0 < beta < 1, f"onebit_lamb_update: {name} must lie between 0 and 1, got {beta}")
        require(self.eps > 0, f"onebit_lamb_update: eps must be positive, got {self.eps}; 1e-8 is usual")
        require(
            self.weight_decay >= 0, f"onebit_lamb_update: weight_decay must not be negative, got {self.weight_decay}"
        )
        require(
            0 < self.min_coeff <= self.max_coeff,
            f"onebit_lamb_update: must have 0 < min_coeff <= max_coeff, got {self.min_coeff} and {self.max_coeff}; 0.01 and 10 are usual",
        )
        low, high = self.ratio
        require(0 < low <= 1 <= high, f"onebit_lamb_update: ratio must hold 1, as (0.5, 4.0), got {self.ratio}")
        require(
            0 < self.ratio_step < 1, f"onebit_lamb_update: ratio_step must lie between 0 and 1, got {self.ratio_step}"
        )

    def fits(self, binding: Binding) -> None:
        fits(self, binding, (self.beta1, self.beta2), self.eps)
        for optimizer in binding.optimizers:
            for group in optimizer.param_groups:
                if decay := group.get("weight_decay"):
                    raise AttachError(
                        f"{self} with {type(optimizer).__name__}(weight_decay={decay}): LAMB's decay is part of its trust ratio; "
                        f"set weight_decay=0 in the optimizer, and weight_decay={decay} in the recipe"
                    )

    def direction(self, mean: Bucket, model: Bucket, state: State, context: Context) -> Tensor:
        out, ends = mean.like(mean.new()), False
        if "divisor" in state:
            old, fresh = state["m"], state["fresh"]
            state["m"] = m = mean.new().copy_(mean.flat).masked_fill_(state["still"], 0.0)
            agreed = (m - self.beta1 * old) / (1 - self.beta1)
            state["fresh"] = running(fresh, agreed.square_(), self.beta2)
            push, coefficient = m / state["divisor"], self._frozen
        else:
            push, ends = self._warm_push(mean, state)
            coefficient = self._warm
        whole = torch.add(push, model.flat, alpha=self.weight_decay)
        for s, (_, x), (_, u), (_, step) in zip(
            mean.layout.segments, model.tensors(), mean.like(whole).tensors(), out.tensors(), strict=True
        ):
            if s.numel:
                own = slice(s.offset, s.offset + s.numel)
                torch.mul(u, coefficient(s.name, own, x, u, push[own], state), out=step)
        if ends:
            self._end_warmup(mean, state)
        return out.flat

    def _warm_push(self, mean: Bucket, state: State) -> tuple[Tensor, bool]:
        """Adam's step, and True if it is the last one before the freeze."""
        m, v, steps = moments(mean, state, (self.beta1, self.beta2), self.bias_correction)
        return m / v.sqrt().add_(self.eps), steps >= self.warmup

    def _warm(self, name: str, own: slice, x: Tensor, u: Tensor, push: Tensor, state: State) -> Tensor:
        long, step = x.norm(), u.norm()
        c = torch.where((long > 0) & (step > 0), (long / step).clamp(self.min_coeff, self.max_coeff), 1.0).view(1)
        state[f"c:{name}"] = running(state.get(f"c:{name}"), c, self.coeff_beta)
        return c[0]

    def _frozen(self, name: str, own: slice, x: Tensor, u: Tensor, push: Tensor, state: State) -> Tensor:
        c, last = state[f"c:{name}"], state[f"r:{name}"]
        if self.coefficients == "frozen":
            return c[0]
        divisor, fresh = state["divisor"][own], state["fresh"][own].sqrt().add_(self.eps)
        r = (divisor / fresh).masked_fill_(divisor == inf, 0.0).max().view(1)
        if self.weight_decay:
            share = (push.norm() / u.norm()).nan_to_num(1.0, 1.0).clamp(max=1.0)
            r = share * r + 1 - share
        r = torch.minimum(
            torch.maximum(r.clamp(*self.ratio), last * (1 - self.ratio_step)), last * (1 + self.ratio_step)
        )
        state[f"r:{name}"] = r
        return (c * r)[0]

    def _end_warmup(self, mean: Bucket, state: State) -> None:
        steps = int(state["steps"])
        v = corrected(state["v"], self.beta2, steps) if self.bias_correction else state["v"]
        state["divisor"], state["fresh"] = frozen(v, self.eps), v
        state["still"] = state["divisor"] == inf
        for s in mean.layout.segments:
            if s.numel:
                state[f"c:{s.name}"] = corrected(state[f"c:{s.name}"], self.coeff_beta, steps)
                state[f"r:{s.name}"] = torch.ones_like(state[f"c:{s.name}"])
        del state["v"], state["steps"]
