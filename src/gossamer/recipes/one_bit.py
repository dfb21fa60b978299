"""One bit per element."""

from typing import Literal

from gossamer.codecs import DCTTopK, Sign, SignColumns, Ternary, Vote
from gossamer.controllers import SwitchExchange
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.memories import ErrorFeedback, NoMemory
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import ZeroOne
from gossamer.updates import Lion, OneBitAdamUpdate, OneBitLambUpdate, Signs, ZeroOneAdamUpdate


@preset
def signsgd(momentum: float = 0.0) -> Recipe:
    """Signs of the gradients (of the momenta with `momentum`), combined by majority vote.

    Use: with plain SGD at a hundredth of its usual learning rate or less, below about 1 Gbit/s, where some ranks may send wrong
    gradients: 32 times fewer bytes whatever the number of ranks, and each rank has one vote. With `momentum=0.9` it is Signum.

    Not for: optimizers with momentum, which Signum refuses, nor adaptive ones, nor few ranks with small batches: a sign ignores
    the gradient's size. A gradient that is 4 in one batch of four and -1 in the others moves the wrong way for ever; under
    `ef_signsgd` it does not. Nor embeddings of which few rows are used: the unused rows move at random.

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD, ICML 2018; Bernstein, Zhao, Azizzadenesheli, Anandkumar,
    signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019.
    """
    votes = Scatter(Sign("one"), feedback=0.0, own="encoded")
    return Recipe(votes, NoMemory(allow_biased=True), update=Signs(momentum))


@preset
def distributed_lion(beta1: float = 0.9, beta2: float = 0.99, combine: Literal["vote", "mean"] = "vote") -> Recipe:
    """Lion: signs of each rank's own momentum and gradient, combined by majority vote, or as their mean.

    Use: in place of Lion, with SGD without momentum at Lion's learning rate and weight decay: 20 times fewer bytes whatever the
    number of ranks, and one momentum as memory. `combine="mean"` sends exact means of the signs: among four ranks 4.6 bits
    an element, in integers that all-reduce sums.

    Not for: optimizers with momentum, which it refuses, nor AdamW's learning rate, which is too large. A tie is 0: among
    two ranks an element moves only where both agree. For one bit an element, with ties and zeros by coin:
    `scatter(sign('one'), feedback=0.0, own='encoded') + none(allow_biased=True) + lion()`. On `digits` both had held-out losses of
    .21 and .23 at two seeds, `signsgd(momentum=0.9)` .135 and .169.

    Paper: Liu et al., Communication Efficient Distributed Training with Distributed Lion, NeurIPS 2024.
    """
    update = Lion(beta1, beta2, combine)
    if combine == "mean":
        return Recipe(AllReduced(Ternary(clip=0.0)), update=update)
    votes = Scatter(Vote(), feedback=0.0, own="encoded")
    return Recipe(votes, NoMemory(allow_biased=True), update=update)


@preset
def ef_signsgd() -> Recipe:
    """Signs and one scale per parameter, with error feedback in both phases.

    Use: below about 1 Gbit/s, with SGD at its usual learning rate: 32 times fewer bytes whatever the number of ranks.

    Not for: adaptive optimizers: their step is not proportional to the gradient, as the residual assumes; use `onebit_adam`.
    Nor embeddings of which few rows are used: the residuals of the other rows grow for long. It keeps a residual as large as
    the model.

    Paper: Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    """
    return Recipe(Scatter(Sign("l1")), ErrorFeedback(units="update"))


@preset
def demo(keep: int = 32, side: int = 64, decay: float = 0.999) -> Recipe:
    """Top DCT coefficients of the momentum, then the sign of their mean.

    m = decay m + g;  q = the `keep` largest coefficients of the cosine transform of every `side` by `side` tile of m;  m -= the
    inverse transform of q;  x -= lr sign(mean of the inverse transforms). So fast components are sent at once, and slow ones
    accumulate until they are large enough. The mean is over all ranks; the authors' code divides each coefficient by the number
    of ranks that sent it.

    Use: below about 100 Mbit/s among few ranks, with SGD without momentum at a hundredth of its usual learning rate or less, and
    weight decay if any.

    Not for: optimizers with momentum, nor Adam: the recipe has its own momentum, and the step is a sign. Nor many ranks: bytes
    grow with their number.

    Paper: Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, 2024.
    """
    return Recipe(Gather(DCTTopK(keep, side)), ErrorFeedback(decay=decay), update=Signs())


@preset
def onebit_sgd() -> Recipe:
    """Signs and two values per matrix row, with error feedback in both phases.

    Use: below about 1 Gbit/s, with SGD, for matrices with rows of differently large gradients: 25 times fewer bytes for a
    matrix of 256 columns.

    Not for: models of short rows or of vectors, which are sent in full. Nor many ranks for a small model: a chunk of less than
    eight rows is sent in full, and bytes grow with the number of ranks. It keeps a residual as large as the model.

    Paper: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014; which sends each gradient while the
    next is computed, as `onebit_sgd + delayed()` does, and begins in full precision: `allreduce(fp32()) + delayed() +
    switch_exchange(1000, scatter(sign_columns()), error_feedback())`.
    """
    return Recipe(Scatter(SignColumns()), ErrorFeedback())


CARRIER = Scatter(Sign("l2"), own="encoded")
"""Signs of a momentum and its L2 norm, sent in two phases, with error feedback in both."""


@preset
def onebit_adam(
    warmup: int, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, bias_correction: bool = True
) -> Recipe:
    """Adam: full gradients during the warm-up, then the signs of the momentum with a frozen second moment.

    Use: with AdamW, in place of DeepSpeed's OneBitAdam, on long runs below about 1 Gbit/s: after the warm-up 1/32 of dense's
    bytes, whatever the number of ranks. Set `warmup` to 15 to 25 percent of all steps.

    Not for: short runs: a warm-up of 20 percent alone sends a fifth of dense's bytes. Nor runs whose gradients are still large
    at the end of the warm-up: the frozen second moment then makes all later steps too small.

    Paper: Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed, ICML 2021.
    """
    update = OneBitAdamUpdate(warmup, beta1, beta2, eps, bias_correction)
    return Recipe(DENSE, controller=SwitchExchange(warmup, CARRIER, ErrorFeedback()), update=update)


@preset
def zero_one_adam(
    freeze: int,
    kappa: int = 16,
    scaler: int = 32678,
    clipper: int = 16,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    bias_correction: bool = True,
) -> Recipe:
    """Adam: signs of the gradients and rarer and rarer full gradients, then signs of the updates after local steps.

    Use: with AdamW, in place of DeepSpeed's ZeroOneAdam, on long runs below about 1 Gbit/s: fewer bytes than `onebit_adam` from
    the first steps on, and few messages. Set `freeze` to the end of the learning rate's warm-up, and `scaler` to the number of
    steps in which the learning rate halves.

    Not for: short runs, nor ranks whose data differ much: their models drift apart in a round. Nor runs whose gradients are
    still large at the freeze, as `onebit_adam`.

    Paper: Lu, Li, Zhang, De Sa, He, Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023.
    """
    update = ZeroOneAdamUpdate(beta1, beta2, eps, bias_correction)
    return Recipe(CARRIER, ErrorFeedback(), ZeroOne(freeze, kappa, scaler, clipper), update=update)


@preset
def onebit_lamb(
    warmup: int,
    weight_decay: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coefficients: Literal["adaptive", "frozen"] = "adaptive",
) -> Recipe:
    """LAMB: full gradients during the warm-up, then the signs of the momentum with frozen second moment and trust ratios.

    Use: with AdamW or SGD (weight decay 0 in the optimizer), in place of DeepSpeed's OneBitLamb: for large batches on long runs
    below about 1 Gbit/s. Set `warmup` to 15 to 25 percent of all steps.

    Not for: short runs, as `onebit_adam`. Nor Adam's learning rates: the length of a step is the tensor's norm times the rate.

    Paper: Li, Awan, Tang, Rajbhandari, He, 1-bit LAMB, 2021.
    """
    update = OneBitLambUpdate(warmup, weight_decay, max_coeff=max_coeff, min_coeff=min_coeff, coefficients=coefficients)
    return Recipe(DENSE, controller=SwitchExchange(warmup, CARRIER, ErrorFeedback()), update=update)
