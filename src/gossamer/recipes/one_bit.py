"""One bit per element."""

from typing import Literal

from gossamer.codecs import DCTTopK, Sign, SignColumns
from gossamer.controllers import SwitchExchange
from gossamer.exchanges import Gather, Scatter
from gossamer.memories import ErrorFeedback, NoMemory
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import ZeroOne
from gossamer.updates import OneBitAdamUpdate, OneBitLambUpdate, Signs, ZeroOneAdamUpdate


@preset
def signsgd(momentum: float = 0.0) -> Recipe:
    """The majority's vote on the sign of each element; with `momentum` on that of each rank's running mean.

    Use: with plain SGD at a hundredth of its usual rate or less, below about 1 Gbit/s, where ranks may be wrong: 32 times fewer
    bytes whatever their number, and none of them has more than one vote. With `momentum=0.9` it is Signum.

    Not for: optimizers with momentum, which Signum refuses, nor adaptive ones, nor few ranks with small batches: a sign is right or
    wrong, whatever the size of what it is of. Of a gradient that is 4 in one batch of four and -1 in the others it goes the
    wrong way for ever, which `ef_signsgd` does not. Nor embeddings of which few rows are used: the others walk at random.

    Paper: Bernstein, Wang, Azizzadenesheli, Anandkumar, signSGD, ICML 2018; Bernstein, Zhao, Azizzadenesheli, Anandkumar,
    signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019.
    """
    votes = Scatter(Sign("one"), feedback=0.0, own="encoded")
    return Recipe(votes, NoMemory(allow_biased=True), update=Signs(momentum))


@preset
def ef_signsgd() -> Recipe:
    """The sign of each element and one size for each parameter, and error feedback for the rest, in both phases.

    Use: below about 1 Gbit/s, with SGD at its usual rate: 32 times fewer bytes whatever the number of ranks.

    Not for: adaptive optimizers, whose step does not shrink with the rate as what is held back does: `onebit_adam` is made for
    those. It keeps a residual as large as the model. Nor embeddings of which few rows are used, whose residuals grow for long.

    Paper: Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019.
    """
    return Recipe(Scatter(Sign("l1")), ErrorFeedback(units="update"))


@preset
def demo(keep: int = 32, side: int = 64, decay: float = 0.999) -> Recipe:
    """Of each rank's momentum its largest waves travel and leave it, and the model takes the signs of their mean.

    m = decay m + g;  q = the `keep` largest coefficients of the cosine transform of every `side` by `side` of m;  m -= what they
    make;  x -= lr sign(mean of what they make). So what moves fast is sent, and what moves slowly grows until it is. The mean is
    that of all ranks; the authors' code divides each coefficient by the number of ranks that sent it.

    Use: below about 100 Mbit/s among few ranks, with SGD without momentum at a hundredth of its usual rate or less, and weight
    decay if any.

    Not for: optimizers with momentum or Adam's: the momentum is here, and the step is a sign. Nor many ranks:
    bytes grow with their number.

    Paper: Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, 2024.
    """
    return Recipe(Gather(DCTTopK(keep, side)), ErrorFeedback(decay=decay), update=Signs())


@preset
def onebit_sgd() -> Recipe:
    """Signs, with two numbers for each row of a matrix, and error feedback for the rest, in both phases.

    Use: below about 1 Gbit/s, for matrices whose rows' gradients differ in size, with SGD: 25 times fewer bytes of a matrix of
    256 columns.

    Not for: models of short rows or of vectors, which travel as they are, nor many ranks for a small model: a chunk of less than
    eight rows is no matrix, and bytes grow with their number. It keeps a residual as large as the model.

    Paper: Seide, Fu, Droppo, Li, Yu, 1-Bit Stochastic Gradient Descent, Interspeech 2014; which lets each gradient travel while
    the next is computed, as `onebit_sgd + delayed()` does, and begins in full precision: `allreduce(fp32()) + delayed() +
    switch_exchange(1000, scatter(sign_columns()), error_feedback())`.
    """
    return Recipe(Scatter(SignColumns()), ErrorFeedback())


CARRIER = Scatter(Sign("l2"), own="encoded")
"""A momentum's signs in two phases, as long as it is, with error feedback on both sides."""


@preset
def onebit_adam(
    warmup: int, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, bias_correction: bool = True
) -> Recipe:
    """Adam for a warm-up; then its second moment is frozen, and its momentum travels as signs.

    Use: with AdamW, in place of DeepSpeed's OneBitAdam, on long runs below about 1 Gbit/s: from the freeze on a 32nd of dense's
    bytes, whatever the number of ranks. Say a `warmup` of 15 to 25 percent of all steps.

    Not for: short runs: of 20 percent of dense steps alone the whole run's bytes are a fifth. Nor runs whose gradients are
    still large at the freeze: the frozen second moment makes all later steps too small.

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
    """Adam whose second moment learns at fewer and fewer steps, then is frozen, while ranks step apart and meet in signs.

    Use: with AdamW, in place of DeepSpeed's ZeroOneAdam, on long runs below about 1 Gbit/s: fewer bytes than `onebit_adam` from
    the first steps on, and few messages. Let `freeze` be the end of the learning rate's warm-up, and `scaler` the steps in which
    the rate halves.

    Not for: short runs, nor ranks whose data differ much: in a round each goes its own way. Nor runs whose gradients are still
    large at the freeze, as `onebit_adam`.

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
    """LAMB for a warm-up; then its second moment and trust ratios are frozen, and its momentum travels as signs.

    Use: with AdamW or SGD, without weight decay of theirs, in place of DeepSpeed's OneBitLamb: for large batches on long runs below
    about 1 Gbit/s. Say a `warmup` of 15 to 25 percent of all steps.

    Not for: short runs, as `onebit_adam`; nor rates of Adam's: steps are as long as a tensor times the rate.

    Paper: Li, Awan, Tang, Rajbhandari, He, 1-bit LAMB, 2021.
    """
    update = OneBitLambUpdate(warmup, weight_decay, max_coeff=max_coeff, min_coeff=min_coeff, coefficients=coefficients)
    return Recipe(DENSE, controller=SwitchExchange(warmup, CARRIER, ErrorFeedback()), update=update)
