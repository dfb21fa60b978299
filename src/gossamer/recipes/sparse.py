"""Sparsified gradients: the largest elements, random elements, or a sketch."""

from typing import Literal

from gossamer.codecs import AdaComp, CountSketch, Dropping, RandK, Strom, TopK
from gossamer.exchanges import AllReduced, FetchSGD, Gather, GTopK, Scatter
from gossamer.memories import EF21, ErrorFeedback, MomentumCorrection, NoMemory, OwnGradient
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.rules import Rule
from gossamer.schedules import Resync


@preset
def topk(ratio: float = 0.01, scope: Literal["tensor", "block", "global"] = "block") -> Recipe:
    """Top one percent of the gradient's elements, with error feedback.

    Use: below about 1 Gbit/s between few ranks, where few elements of a gradient matter; the others are sent later.

    Not for: many ranks: every rank receives every other rank's message, so bytes grow with the number of ranks, and from 100
    ranks on one percent is more than dense; `scatter(topk()) + error_feedback()` does not grow. It keeps a residual as large
    as the model.

    The one percent is taken of a bucket, not of each tensor: a language model (`lm`, 48 steps, 1.3 times its learning rate,
    4 ranks, seeds 20, 21 and 22) ended with 5.22, 5.17 and 5.05 nats, and with `scope="tensor"` with 5.29, 5.26 and 5.13;
    `fashion` (96 steps, 2.2 times its learning rate) with an accuracy of .76, .77 and .75, and with .72, .72 and .67. Where
    other presets compare themselves with `topk`, both sent one percent of each tensor.

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017.
    """
    return Recipe(Gather(TopK(ratio, scope)), ErrorFeedback())


@preset
def sparse_scatter(ratio: float = 0.01) -> Recipe:
    """Top one percent in a reduce-scatter, then the top one percent of the mean in an all-gather, with error feedback.

    Use: in place of `topk` from three ranks on: bytes do not grow with the number of ranks, 49.9 times fewer than dense.

    Not for: two ranks: there `topk` sends as many bytes and selects only once. It keeps a residual as large as the model, and
    each rank a second residual for its chunk of the mean.

    In the setting of `gtopk`'s figures it ended with a loss of .73, `gtopk` with .62 in as many bytes.

    Paper: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022, which goes in two such phases.
    """
    return Recipe(Scatter(TopK(ratio)), ErrorFeedback())


@preset
def gtopk(ratio: float = 0.01) -> Recipe:
    """Global top one percent: ranks merge their top-k pairwise on a tree, with error feedback.

    Use: in place of `topk` from three ranks on: bytes do not grow with the number of ranks, 49.9 times fewer than dense.

    Not for: links of high latency: messages go up the tree one after the other, and down again. Nor where rank 0 has the
    slowest link: it takes part in all of them. It keeps a residual as large as the model.

    A small network on Fashion-MNIST (lr .02, momentum .9, 4 ranks, 200 steps, means of three seeds) ended with a loss of .62 in 24.8 kB
    a step, `topk` with .67 in 49.8, `sparse_scatter` with .73 in 25.0. An LSTM language model (`lm-lstm`, 60 steps, one seed) ended at
    5.09 in 189 kB, with `topk` at 5.02 in 379.

    Paper: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
    ICDCS 2019.
    """
    return Recipe(GTopK(ratio), ErrorFeedback())


@preset
def randk(ratio: float = 0.01) -> Recipe:
    """Random one percent of the elements, the same on all ranks, with error feedback.

    Use: as a baseline for `topk`; and among many ranks, where all elements of a gradient are about as large: 99.7 times fewer
    bytes whatever the number of ranks, and no selection to compute.

    Not for: an unchanged learning rate: an element waits for about a hundred steps, then moves by the sum of all of them. It
    keeps a residual as large as the model.

    In the setting of `gtopk`'s figures, one seed (`gtopk`: .64), it ended above the loss that it began with (2.90); with a fifth
    of the learning rate at 1.21; with a tenth of all elements and the unchanged rate at 1.47.

    Paper: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    """
    return Recipe(AllReduced(RandK(ratio)), ErrorFeedback())


@preset
def ef21(ratio: float = 0.01, eta: float = 1.0) -> Recipe:
    """Top one percent of the difference between the gradient and its running estimate (EF21).

    Use: with exact or nearly exact gradients, where the exact optimum is wanted and `topk` stalls: with full gradients of
    three different logistic problems the squared distance to it was 5e-15 after 150 steps, that of `topk` .08.

    Not for: minibatches, on which `topk` learns faster; nor many ranks: bytes grow with their number. With noisy gradients
    take `eta=0.1` to .3, which averages gradients first, and an optimizer without momentum. It keeps two copies of the
    gradient, and a third with eta below 1.

    A small network on Fashion-MNIST (4 ranks, 200 steps, one seed) ended with a loss of .73 with momentum in the optimizer (lr .02; `topk`
    .70); without it, at lr .2, of .76, .58 with `eta=0.3` and .61 with .1 (`topk` .51). With `eta=0.1` and momentum in both 2.01.

    Paper: Richtarik, Sokolov, Fatkhullin, EF21, NeurIPS 2021; Fatkhullin, Tyurin, Richtarik, Momentum Provably Improves Error
    Feedback!, NeurIPS 2023.
    """
    return Recipe(Gather(TopK(ratio, "block")), EF21(eta))


@preset
def strom(threshold: float = 0.1) -> Recipe:
    """Elements above a threshold, as one signed threshold each, with error feedback.

    Use: between few ranks, with a threshold found by trials: the number of bytes follows the gradients.

    Not for: another model with the same threshold: there it sends nearly everything, or nothing for long. Nor GPUs: the host
    does not know in advance how long a message will be. Nor many ranks: bytes grow with their number. It keeps a residual as
    large as the model.

    In the setting of `gtopk`'s figures, one seed: a loss of .80 in 13 kB a step; with a threshold of .03, 1.00 in 82; with .01,
    3.93 in 252; `topk` had .70 in 50. A threshold below the usual size of gradients sends less per step than the gradient adds,
    and the delayed rest does harm. Without momentum, at lr .2, .53 in 10 (`topk` .51). On the LSTM the threshold of the small
    network sent next to nothing: 6.06 in .3 kB; with .01, 5.41 in 53 (`topk` 5.02 in 379).

    Paper: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.
    """
    return Recipe(Gather(Strom(threshold)), ErrorFeedback())


@preset
def adacomp(bin: int = 500, convolutions: int = 50) -> Recipe:
    """Signs of the elements that residual plus twice the gradient lifts above their bin's maximum, with error feedback.

    Use: between few ranks, where you do not want to choose a ratio: it sends less by itself where gradients allow it.

    Not for: GPUs: the host does not know in advance how long a message will be. Nor many ranks: bytes grow with their number.
    It keeps a residual as large as the model.

    In the setting of `gtopk`'s figures: a loss of .61 in 17 to 22 kB a step, `topk` .67 in 49.8. With bins four times as long,
    one seed: .73 in 7.9. The LSTM: 5.32 in 101 kB, `topk` 5.02 in 379.

    Paper: Chen et al., AdaComp, AAAI 2018; bins of 50 for convolutions, and of 500 for all else.
    """
    return Recipe(
        Gather(AdaComp(bin)), ErrorFeedback(), rules=(Rule("ndim > 2", Gather(AdaComp(convolutions)), ErrorFeedback()),)
    )


@preset
def local_gradients(
    ratio: float = 0.01,
    warmup: int = 0,
    mode: Literal["partial", "sum", "errors"] = "partial",
    every: int = 50,
    sync: Literal["average", "flush"] = "average",
) -> Recipe:
    """Top one percent of all ranks' gradients plus the rank's own full gradient; models are averaged every 50 steps.

    Use: in place of `topk` where ranks' data are similar and few elements are sent: each rank applies its own unsent elements
    at once. With two elements in a thousand, four ranks reached an accuracy of .937 on handwritten digits in 300 steps (three
    seeds: .88 to .97), top-k .907 (.86 to .94), dense .964; with one in a hundred .966, .947 and .964.

    Not for: ranks whose data differ: there it was no better than top-k (.933 and .937, dense .967), and on one seed worse
    without averages (.90 and .93). Do not use "sum" and "errors" there. Nor many ranks: bytes grow with their number.
    Nor parts that need the same gradient on all ranks: controllers, sign updates, ZeRO. Models differ between averages:
    evaluate under `comm.consensus()`.

    `warmup` sends more at first, and is for CPUs; it too selects per bucket. `sync="flush"` sends all residuals exactly, and
    needs plain SGD.

    Paper: Aji, Heafield, Bogoychev, Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network
    Training, EMNLP 2019; 99 percent dropped, a warm-up of 1000 steps, averages every 500.
    """
    codec = Dropping(ratio, warmup, scope="block") if warmup else TopK(ratio, "block")
    memory = OwnGradient(mode, "gradient" if sync == "average" else "update")
    return Recipe(Gather(codec), memory, Resync(every, sync))


@preset
def dgc(ratio: float = 0.001, momentum: float = 0.0, warmup: int = 0, clip: float | None = None) -> Recipe:
    """Top 0.1 percent of the elements, with momentum correction; one-dimensional tensors are sent in full.

    Use: below about 1 Gbit/s between few ranks: the fewest bytes of all presets on up to 7. With `momentum=0.9` and an
    optimizer without momentum it is the paper's method; without, the optimizer keeps its momentum, and this is error feedback.

    Not for: many ranks: every rank receives every other rank's message, so bytes grow with the number of ranks, and with a
    thousand they equal dense's. Nor short runs: an element waits for hundreds of steps. It keeps a residual as large as the
    model, and with momentum another.

    A small network on Fashion-MNIST (lr .02, 4 ranks, 240 steps, one seed), with the largest of each tensor as in the paper, ended
    with a loss of .49 dense, .66 under `topk`, .79 under `dgc` with momentum in the optimizer and .66 with it here, in an eighth of
    `topk`'s bytes. Selecting per bucket, as here, is better: `fashion` (96 steps, 2.2 times its learning rate, seeds 20 to 22)
    ended with an accuracy of .67, .67 and .67, and per tensor with .58, .42 and .33; `lm` (48 steps, 1.3 times its learning rate)
    with 5.33, 5.22 and 5.18 nats, and with 5.74, 5.69 and 5.68.

    `warmup` steps begin with a quarter of the elements and end with the ratio, selected per bucket too, and are for CPUs; `clip`
    shortens each rank's gradients to clip / sqrt(N), parameter by parameter, before they enter the momentum. In a run as short as
    that (200 steps, momentum here: .71) both cost: .83 with `warmup=80`, .77 with `clip=2.0`.

    Paper: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018; a warm-up of four epochs.
    """
    codec = Dropping(ratio, warmup, "quarters", "block") if warmup else TopK(ratio, "block")
    return Recipe(Gather(codec), MomentumCorrection(momentum, clip=clip), rules=_vectors(momentum, clip))


@preset
def sketched_sgd(ratio: float = 0.002, candidates: int = 8, momentum: float = 0.0) -> Recipe:
    """Top elements of the sum, found by a summed count sketch and then fetched exactly; one-dimensional tensors are sent in full.

    Use: below about 1 Gbit/s, where few elements of a gradient matter: 20 times fewer bytes whatever the number of ranks. With
    `momentum=0.9` and an optimizer without momentum it is the paper's method.

    Not for: few ranks: there `topk` sends more elements in fewer bytes. Nor gradients without large elements: there the sketch
    finds noise. Its two messages go one after the other, and it keeps a residual as large as the model.

    In the setting of `dgc`'s figures it ended with a loss of .86, and .90 with momentum here; `topk` had .66 in four fifths of
    its bytes among 4 ranks. Among 16 `topk` sends three times as many.

    Paper: Ivkin et al., Communication-Efficient Distributed SGD with Sketching, NeurIPS 2019.
    """
    exchange = AllReduced(CountSketch(ratio, candidates=candidates))
    return Recipe(exchange, MomentumCorrection(momentum), rules=_vectors(momentum))


def _vectors(momentum: float, clip: float | None = None) -> tuple[Rule, ...]:
    """Rules that send one-dimensional tensors (biases, norms: about one percent of all elements) in full."""
    kept = MomentumCorrection(momentum, masking=False, clip=clip) if momentum or clip else NoMemory()
    return (Rule("ndim < 2", DENSE, kept),)


@preset
def fetchsgd(ratio: float = 0.002, momentum: float = 0.0) -> Recipe:
    """Count sketches of gradients, with momentum and error feedback in the sketch, the same on all ranks.

    Use: where a rank can keep no state of its own between steps: 20 times fewer bytes whatever the number of ranks.

    Not for: ranks that can keep a residual: `sketched_sgd` sends as many bytes and learns faster, since its values are exact.
    Here they are estimates. In the setting of `dgc`'s figures it ended with a loss of 1.00, and with `momentum=0.9` of its own
    with 1.99.

    Paper: Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020.
    """
    return Recipe(FetchSGD(ratio, momentum=momentum))
