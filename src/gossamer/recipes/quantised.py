"""Quantised gradients: a few bits per element."""

from typing import Literal

from gossamer.codecs import BF16, EDEN, FP8, QSGD, Int8, Natural, Ternary
from gossamer.controllers import DQSGD
from gossamer.exchanges import Gather, Scatter
from gossamer.memories import DIANA
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.rules import Rule
from gossamer.schedules import EveryStep


@preset
def int8(block: int = 128, rounding: Literal["stochastic", "nearest"] = "stochastic") -> Recipe:
    """8-bit integers with one scale per 128 elements, in both phases.

    Use: below about 10 Gbit/s, where `bf16` still sends too much: 3.9 times fewer bytes than dense, nothing to tune, no residual,
    and no measurable loss of quality. A small Transformer (byte language model, four ranks) had a held-out loss of 2.481 after 120
    steps, as had dense and `bf16`; two seeds, differences below .001.

    Not for: links on which dense hides behind backward, nor below 1 Gbit/s, where fewer bits pay: `qsgd` has four, and was at
    2.493.

    Error feedback changed nothing there (`int8 + error_feedback()`: 2.481), nor did rounding to the nearest (2.480), which is
    somewhat faster, and biased.

    Paper: none; common in teams' own communication hooks.
    """
    return Recipe(Scatter(Int8(block, rounding=rounding)))


@preset
def fp8(format: Literal["e4m3", "e5m2"] = "e4m3", block: int = 128) -> Recipe:
    """8-bit floats with one scale per 128 elements, in both phases.

    Use: in place of `int8` where a few of 128 elements are far larger than the others, in as many bytes: 3.9 times fewer than
    dense. The small Transformer of `int8`'s note had the same loss under it, 2.480, and under `e5m2` 2.479.

    Not for: gradients without such outliers: there `int8` has less noise. The format is used on the network only: nothing is
    computed in eight bits, and the GPU needs no support for it.

    Paper: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """
    return Recipe(Scatter(FP8(format, block)))


@preset
def natural() -> Recipe:
    """Signs and exponents (powers of two, rounded at random), in both phases.

    Use: where elements of a gradient differ by many orders of magnitude: 4 times fewer bytes, nothing to tune, no residual.

    Not for: other gradients: `int8` sends about as many bytes with less noise. The small Transformer of its note was at 2.485
    after 120 steps under powers of two, at 2.481 under `int8`.

    Paper: Horvath et al., Natural Compression for Distributed Deep Learning, 2019.
    """
    return Recipe(Scatter(Natural()))


@preset
def terngrad(
    clip: float = 2.5, levels: int = 1, last: Literal["ternary", "qsgd", "bf16", "fp32"] = "ternary"
) -> Recipe:
    """Ternary gradients (-s, 0 or +s), then their mean in three bits.

    Use: below about 1 Gbit/s: 14 times fewer bytes whatever the number of ranks, fast to encode, and no residual. For
    classifiers and language models write `terngrad(last="qsgd")`: it sends the output layer in 4 bits.

    Not for: links on which dense hides behind backward. Nor, without `last`, models of many classes or words: the gradients
    of their output layer are large in few rows, and clipping leaves a fifth of those.

    The additional steps that it needs are due to the last layer. A Transformer of 5.8 million parameters on four ranks (`lm`, dense
    after 50 steps: 5.049) was at 5.303 after 50 steps and took 82 to dense's loss, with 13.7 times fewer bytes; with `last="qsgd"`
    (the head in 4 bits) at 5.059, 12.9 times; with `last="fp32"`, which is the paper's own choice, at 5.052, 6.4 times, since that
    head is a tenth of the model. A small one (dense 5.288): 5.550, and with a wider clip of 4 5.477, without clipping 5.390, with
    `levels=3` 5.551; with the head in 3, 4, 16 or 32 bits 5.305, 5.290, 5.289, 5.289. So neither more levels nor a wider clip help.
    A rule sends small tensors dense, as TernGrad's authors did: `terngrad + rule('numel < 9217', allreduce(fp32()))`.

    The second phase encodes the mean again, with `qsgd` of one bit more than the messages. With ternary values there as well,
    `scatter(ternary())`, it is 20 times shorter than dense, but the mean is clipped twice and noisier: on Gaussian
    gradients of 8 ranks the relative variance is 2.7, in three bits 1.25, unencoded .88, and 1.0 on shared scales
    (`allreduce(ternary())`). A small Transformer on four ranks had a loss of 5.06 after 100 steps in ternary values,
    4.95 in three bits, 4.94 unencoded; dense had 5.05 after 50.

    Paper: Wen et al., TernGrad, NIPS 2017.
    """
    bits = min((2 * levels).bit_length() + 1, 8)
    ways = {"qsgd": Scatter(QSGD(4)), "bf16": Scatter(BF16()), "fp32": DENSE}
    rules = (Rule("last", ways[last]),) if last != "ternary" else ()
    return Recipe(Scatter(Ternary(clip, levels), answer=QSGD(bits)), rules=rules)


@preset
def qsgd(bits: int = 4, bucket: int = 128, norm: Literal["max", "l2"] = "max") -> Recipe:
    """Stochastic rounding to 4 bits per element, in both phases.

    Use: below about 1 Gbit/s where `terngrad` is too coarse: 7.5 times fewer bytes at 4 bits whatever the number of
    ranks, unbiased, and no residual. Buckets of 128 elements have 36 to 45 % less noise than the 512 of `qsgd()` the codec, for 4.6 %
    more bytes, on the gradients of three workloads; with 2 bits 512 are the better use of bytes.

    Not for: links on which dense hides behind backward. Below 4 bits its noise grows fast and costs steps: then
    take more bits, or `eden`.

    The second phase encodes the mean again. At 4 bits that doubles a small variance (with buckets of 512, Gaussian gradients of 8
    ranks: .07 instead of .03) and cost no steps: a small Transformer on four ranks had a loss of 4.78 after 100, dense 4.77.

    Paper: Alistarh et al., QSGD, NIPS 2017.
    """
    return Recipe(Scatter(QSGD(bits, bucket, norm)))


@preset
def eden(bits: int = 2, block: int = 1024) -> Recipe:
    """Random rotation, then the nearest of 4 levels, in both phases.

    Use: in place of `qsgd` below about 500 Mbit/s, for nearly half its bytes at as little loss, unbiased, and no residual. A
    Transformer of 5.8 million parameters (`lm`, four virtual ranks, 60 steps, two seeds) ended .005 above dense's loss of 4.955;
    `qsgd` with 3 bits .019.

    Not for: faster links, on CPUs: to encode takes several times as long as with `qsgd`. Nor sparse gradients, where
    `scatter(qsgd(code="rice"))` is more exact in about as many bytes.

    Vectors are small, and what fits into no block travels in full: `eden + rule('ndim < 2', allreduce(fp32()))` sends all of them so.

    Paper: Vargaftik et al., EDEN, ICML 2022.
    """
    return Recipe(Scatter(EDEN(bits, block)))


@preset
def drive(answer: int = 2, block: int = 1024) -> Recipe:
    """Random rotation and signs with one scale per block, then their mean in 2 bits.

    Use: for the fewest bytes without a residual: 21 times fewer than dense. In the measurement of `eden`'s note it ended .012 above
    dense's loss.

    Not for: links on which `eden` fits: one bit has four times the noise of two. Nor sparse gradients.

    The mean in one bit as well, `scatter(eden(1))`, has 1.5 times fewer bytes and twice the noise in the mean.

    Paper: Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, NeurIPS 2021.
    """
    return Recipe(Scatter(EDEN(1, block), answer=EDEN(answer, block)))


@preset
def dqsgd(steps: int, bits: float = 3.0, per: Literal["model", "layer"] = "layer") -> Recipe:
    """Stochastic rounding with a number of bits chosen per layer and step, `bits` on average.

    Use: in place of `qsgd` where the number of steps is known: at 3 bits a small Transformer on four ranks lost no quality
    (4.971 after 100 steps, as dense; 10.4 times fewer bytes), and little at 2.5 (4.984; 12.5 times); `qsgd` was at 4.993 with 3 bits
    (10.4 times) and at 5.120 with 2 (15.5 times), and needs 4 to lose nothing (7.9 times).

    Not for: runs of unknown length. `per="model"`, one width for all layers, gained nothing at 3 bits, where it never changed
    the width, and at 2.5 (5.044) less than `per="layer"`: it is for models of one layer, and for gradients that shrink much. It
    takes two more passes over the gradient at each step.

    Paper: Yan, Huang, Lan, Song, DQ-SGD, 2021.
    """
    return Recipe(Scatter(QSGD(max(2, min(8, round(bits))))), controller=DQSGD(steps, bits, per=per))


@preset
def diana(bits: int = 2, bucket: int = 512, momentum: float = 0.0, l1: float = 0.0) -> Recipe:
    """Differences between the gradient and its running estimate, in 2 bits (DIANA).

    Use: on convex problems with full or large batches, where the exact optimum is wanted: quantised gradients alone
    stall before it.

    Not for: small noisy batches, with which training stalls anyway. Nor many ranks: bytes grow with their number, and from
    32 ranks on two bits are more than dense; `scatter(qsgd(bits=2)) + diana()` does not grow. It keeps two copies of the
    gradient.

    Paper: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019.
    """
    return Recipe(Gather(QSGD(bits, bucket)), DIANA(momentum=momentum), EveryStep(l1=l1))


@preset
def dqgd(bits: int = 2, bucket: int = 512, start: Literal["zero", "first"] = "zero") -> Recipe:
    """Gradients in 2 bits, without DIANA's running estimate: the baseline for `diana`.

    Use: to see what `diana` gains, on convex problems with full gradients. `start="first"` sends differences to the
    first gradients, which are sent in full, once.

    Not for: results: it stalls at a distance set by quantisation noise and step size. On four different logistic problems it
    ended at a squared distance of .09 from the optimum, with `start="first"` at .15; `diana` went on to 2e-30. As under
    `diana`, bytes grow with the number of ranks.

    Paper: Khirirat, Feyzmahdavian, Johansson, Distributed Learning with Compressed Gradients, 2018.
    """
    return Recipe(Gather(QSGD(bits, bucket)), DIANA(alpha=0.0, start=start))
