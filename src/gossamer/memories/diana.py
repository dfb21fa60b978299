"""DIANA: send the difference between the gradient and its running estimate."""

from typing import Annotated, Literal, NamedTuple, final

from torch import Tensor

from gossamer.core.binding import Binding
from gossamer.core.bucket import Bucket, State
from gossamer.core.constraints import Constraint, excludes, requires, those
from gossamer.core.contracts import UNBALANCED, Context, Sender
from gossamer.core.parts import part, require
from gossamer.core.ranges import LogRange, Range
from gossamer.core.verbs import Program
from gossamer.memories.learning import Learning


class DianaPlan(NamedTuple):
    """The theory's values for a problem: rate of the memory, step size, and complexity."""

    alpha: float
    gamma: float
    complexity: float  # steps to a squared distance of e times the first are this times ln(1 / e), but for a constant


def plan(smooth: float, convex: float, ranks: int, block: int, norm: Literal["l1", "l2", "max"] = "max") -> DianaPlan:
    """Rates for `ranks` workers with L-smooth (`smooth`), mu-strongly convex (`convex`) f_i, quantised in blocks of `block`.

    a_p = inf |x|^2 / (|x|_1 |x|_p): 1/d for p = 1 (`bernoulli(bucket=d)`), 1/sqrt(d) for p = 2 (`qsgd(2, d, "l2")`),
    2 / (1 + sqrt(d)) for p = infinity (`qsgd(2, d)`).  alpha = a_p / 2;  c = 4 (1 - a_p) / (N a_p^2);
    gamma = min(alpha / mu, 2 / ((L + mu) (1 + c alpha)));  complexity max(2 / a_p, (L/mu + 1) (1/2 - 1/N + 1/(N a_p))).
    With momentum b in the memory or the optimizer, take gamma (1 - b).

    >>> [round(number, 4) for number in plan(smooth=9.8, convex=0.1, ranks=10, block=40, norm="l1")]
    [0.0125, 0.023, 435.6]
    """
    follows = {"l1": 1 / block, "l2": block**-0.5, "max": 2 / (1 + block**0.5)}[norm]
    alpha, c = follows / 2, 4 * (1 - follows) / (ranks * follows**2)
    gamma = min(alpha / convex, 2 / ((smooth + convex) * (1 + c * alpha)))
    return DianaPlan(alpha, gamma, max(2 / follows, (smooth / convex + 1) * (0.5 - 1 / ranks + 1 / (ranks * follows))))


@final
@part("diana")
class DIANA(Learning):
    """Each worker sends the quantised difference between its gradient and a running estimate h_i of it (DIANA).

    D_i = g_i - h_i;  send Q(D_i);  h_i += a Q(D_i);  g = h + mean Q(D_i) with the old h;  h += a mean Q(D_i);
    v = momentum v + g.  Unbiased, and with full gradients it converges to the exact optimum where Q alone stalls.
    a = 1 / (1 + w) unless given, w the relative variance of the exchange; larger values void the theory. In terms of the
    paper's alpha_p, which is 1 / (1 + w), it is alpha_p itself. Some texts use half of it, which is as right and learns half as
    fast.

    Why that rate: let sum E|Q(D_i) - D_i|^2 <= w sum |D_i|^2, over ranks. Then sum E|h_i + a Q(D_i) - g_i|^2 <= (1 - 2 a +
    a^2 (1 + w)) sum |D_i|^2, which is (1 - a) sum |D_i|^2 at that rate, and may be more than there was from twice it on.
    Only sums over ranks enter, so scales may be shared: tensors of d elements on N ranks are then quantised as one of N d
    elements, and w is that one's. For `allreduce(ternary(clip=0.0))` it is (sqrt(N d) - 1) / 2: with many ranks it learns
    more slowly than `gather`, whose scales are each rank's own.

    `alpha=0` keeps h_i fixed, and is the baseline of the paper: with `start="zero"` distributed quantised gradient descent
    (DQGD), which sends Q(g_i); with `start="first"` differences to each worker's first gradient, which is sent in full, once.
    Both stall where DIANA does not. `gossamer.memories.diana.plan` gives the theory's rate and step size.

    With `momentum` the optimizer must have none: attach refuses one that has, unless the schedule averages models. Weight decay
    that it adds to gradients is then part of f_i, as in the paper's ridge problems: it enters g_i, and counts correctly.

    Use: around unbiased quantisers on convex problems, where the exact optimum is wanted.

    Not for: small noisy batches, nor biased codecs.

    Wire: that of the exchange. Memory: two copies of the gradient per worker: its own and the common one (one more for momentum).

    >>> DIANA(momentum=0.9)
    diana(momentum=0.9)

    Paper: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019.
    """

    alpha: Annotated[float | None, LogRange(0.05, 1.0)] = None
    momentum: Annotated[float, Range(0.0, 0.9)] = 0.0
    start: Literal["zero", "first"] = "zero"

    def __post_init__(self) -> None:
        require(
            self.alpha is None or 0 <= self.alpha <= 1,
            f"diana: alpha must lie in [0, 1], got {self.alpha}; leave it out to follow from the codec",
        )
        require(0 <= self.momentum < 1, f"diana: momentum must lie in [0, 1), got {self.momentum}")

    @property
    def traits(self) -> frozenset[str]:
        return super().traits | those(wants_unbiased=self.alpha != 0, adds_momentum=self.momentum > 0)

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        return (
            requires(
                "unbiased",
                because="{memory} needs an unbiased exchange, and {exchange} is biased; use error_feedback(), or an unbiased "
                "codec such as qsgd(), fp32() or ternary(clip=0.0)",
            ),
            excludes("own feedback", because=UNBALANCED),
        )

    def fits(self, binding: Binding) -> None:
        if "averages gradients" in binding.traits:  # that of rounds is over models, and another one
            binding.refuse_momentum(self, self.momentum)

    @property
    def gain(self) -> float:
        return 1 / (1 - self.momentum)

    def follow(self, omega: float) -> float:
        return 1 / (1 + omega) if self.alpha is None else self.alpha

    def around(self, block: Bucket, state: State, send: Sender, context: Context) -> Program[Tensor]:
        mean = yield from self.learn(block, state, send, context, context.shift)
        if self.momentum == 0:
            return mean
        moved, velocity = block.new().copy_(mean), state.get("velocity")
        if velocity is not None:
            moved.add_(velocity, alpha=self.momentum)
        state["velocity"] = moved
        return mean.copy_(moved)
