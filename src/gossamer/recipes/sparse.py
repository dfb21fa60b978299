"""The largest elements of gradients, or a sketch of them."""

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
    """The largest one percent of a gradient, and error feedback for the rest.

    Use: below about 1 Gbit/s between few ranks, where few elements of a gradient matter; the others are sent later.

    Not for: many ranks: everybody reads everybody's message, so bytes grow with their number, and from 100 ranks on
    one percent is more than dense; `scatter(topk()) + error_feedback()` does not grow. It keeps a residual as large
    as the model.

    One percent of a block and not of each tensor: a language model (`lm`, 48 steps, 1.3 times its rate, 4 ranks, seeds 20,
    21 and 22) ended with 5.22, 5.17 and 5.05 nats, and with `scope="tensor"` with 5.29, 5.26 and 5.13; `fashion` (96 steps,
    2.2 times its rate) with .76, .77 and .75 right, and with .72, .72 and .67. Where other presets give figures of `topk`
    beside theirs, both sent one percent of each tensor.

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017.
    """
    return Recipe(Gather(TopK(ratio, scope)), ErrorFeedback())


@preset
def sparse_scatter(ratio: float = 0.01) -> Recipe:
    """The largest one percent of a gradient for each chunk's owner, and the largest one percent of the mean from it.

    Use: in place of `topk` from three ranks on: bytes do not grow with their number, 49.9 times fewer bytes than dense.

    Not for: two ranks, among which `topk` sends as much and chooses once. It keeps a residual as large as the model, and an
    owner one of what its answers left out.

    In the setting of `gtopk`'s figures it ended with a loss of .73, where that had .62 in as many bytes.

    Paper: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP 2022, which goes in two such phases.
    """
    return Recipe(Scatter(TopK(ratio)), ErrorFeedback())


@preset
def gtopk(ratio: float = 0.01) -> Recipe:
    """The largest one percent of everybody's largest, found on a tree of ranks.

    Use: in place of `topk` from three ranks on: bytes do not grow with their number, 49.9 times fewer bytes than dense.

    Not for: links of high latency: messages go up the tree one after the other, and down again; nor a first rank on the
    slowest link, which takes part in all of them. It keeps a residual as large as the model.

    A small network on Fashion-MNIST (lr .02, momentum .9, 4 ranks, 200 steps, means of three seeds) ended with a loss of .62 in 24.8 kB
    a step, `topk` with .67 in 49.8, `sparse_scatter` with .73 in 25.0. An LSTM language model (`lm-lstm`, 60 steps, one seed) ended at
    5.09 in 189 kB, with `topk` at 5.02 in 379.

    Paper: Shi et al., A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks,
    ICDCS 2019.
    """
    return Recipe(GTopK(ratio), ErrorFeedback())


@preset
def randk(ratio: float = 0.01) -> Recipe:
    """One percent of a gradient, drawn alike on all ranks, and error feedback for the rest.

    Use: to see what choosing gains; and for gradients whose elements are all alike, among many ranks: 99.7 times fewer bytes
    whatever the number of ranks, and nothing is searched.

    Not for: a learning rate left as it was: an element waits for a hundred steps, whatever it holds, and then moves by all of
    them. It keeps a residual as large as the model.

    In the setting of `gtopk`'s figures, one seed, where that had .64, it ended above where it began (2.90); with a fifth of the
    learning rate at 1.21; with a tenth of all elements, and the rate as it was, at 1.47.

    Paper: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    """
    return Recipe(AllReduced(RandK(ratio)), ErrorFeedback())


@preset
def ef21(ratio: float = 0.01, eta: float = 1.0) -> Recipe:
    """The largest one percent of what a gradient differs in from what is known of it.

    Use: on problems whose gradients are exact or nearly so, where the exact optimum is wanted and `topk` stalls: with full
    gradients of three unlike logistic problems the squared distance to it was 5e-15 after 150 steps, `topk` stayed at .08.

    Not for: minibatches, on which `topk` learns faster: bytes grow with their number as there, among many ranks. With noise
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
    """Elements that have grown to a threshold, as one quantum each.

    Use: between few ranks, with a threshold found by trying: bytes follow from how much there is to say.

    Not for: a threshold left as it is on another model: there it sends nearly everything, or nothing for long. Nor GPUs, whose
    host does not know how long a message will be; nor many ranks: bytes grow with their number. It keeps a residual as large
    as the model.

    In the setting of `gtopk`'s figures, one seed: a loss of .80 in 13 kB a step; with .03, 1.00 in 82; with .01, 3.93 in 252;
    `topk` had .70 in 50. Below what gradients usually are, a quantum a step is less than there is to send, and what is late does
    harm. Without momentum, at lr .2, .53 in 10 (`topk` .51). On the LSTM the threshold of the small network sent next to nothing:
    6.06 in .3 kB; with .01, 5.41 in 53 (`topk` 5.02 in 379).

    Paper: Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, Interspeech 2015.
    """
    return Recipe(Gather(Strom(threshold)), ErrorFeedback())


@preset
def adacomp(bin: int = 500, convolutions: int = 50) -> Recipe:
    """Of every bin the elements that this step's gradient carries above the bin's largest, as signs.

    Use: between few ranks, where nobody wants to choose how much to send: it sends less by itself where gradients allow it.

    Not for: GPUs, whose host does not know how long a message will be; nor many ranks: bytes grow with their number. It keeps a
    residual as large as the model.

    In the setting of `gtopk`'s figures: a loss of .61 in 17 to 22 kB a step, where `topk` had .67 in 49.8. With bins four times
    as long, one seed: .73 in 7.9. The LSTM: 5.32 in 101 kB, where `topk` had 5.02 in 379.

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
    """The largest one percent of everybody's gradient, and all of a rank's own; models are averaged now and then.

    Use: in place of `topk` where ranks' data are alike and few elements are sent: what is not sent is used at home.
    With two elements in a thousand, four ranks reached .937 of accuracy on handwritten digits in 300 steps (of three
    seeds .88 to .97), top-k .907 (.86 to .94), dense .964; with one in a hundred .966, .947 and .964.

    Not for: ranks whose data differ, on which it did no better than top-k (.933 and .937, dense .967), and on one seed
    worse without averages (.90 and .93); nor "sum" and "errors" there. Nor many ranks: bytes grow with their number.
    Nor what wants one gradient on all ranks: controllers, sign updates, ZeRO. Models differ between averages: evaluate
    under `comm.consensus()`.

    `warmup` drops less at first, and is for CPUs; the largest are those of a block with it too. `sync="flush"` pays all debts exactly, and takes plain SGD.

    Paper: Aji, Heafield, Bogoychev, Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network
    Training, EMNLP 2019; 99 percent dropped, a warm-up of 1000 steps, averages every 500.
    """
    codec = Dropping(ratio, warmup, scope="block") if warmup else TopK(ratio, "block")
    memory = OwnGradient(mode, "gradient" if sync == "average" else "update")
    return Recipe(Gather(codec), memory, Resync(every, sync))


@preset
def dgc(ratio: float = 0.001, momentum: float = 0.0, warmup: int = 0, clip: float | None = None) -> Recipe:
    """The largest element in a thousand, with momentum kept where the gradient is; vectors travel whole.

    Use: below about 1 Gbit/s between few ranks: the fewest bytes of all presets on up to 7. With `momentum=0.9` and an
    optimizer that has none it is the paper's; without, the optimizer keeps its own, and this is error feedback.

    Not for: many ranks: everybody reads everybody's message, so bytes grow with their number, and with a thousand they are
    dense's. Nor short runs: an element waits for hundreds of steps. It keeps a residual as large as the model, and with momentum
    another.

    A small network on Fashion-MNIST (lr .02, 4 ranks, 240 steps, one seed), with the largest of each tensor as in the paper, ended
    with a loss of .49 dense, .66 under `topk`, .79 under `dgc` with momentum in the optimizer and .66 with it here, in an eighth of
    `topk`'s bytes. The largest of a block, as here, are better ones: `fashion` (96 steps, 2.2 times its rate, seeds 20 to 22) ended
    with .67, .67 and .67 right, and of each tensor with .58, .42 and .33; `lm` (48 steps, 1.3 times its rate) with 5.33, 5.22 and
    5.18 nats, and with 5.74, 5.69 and 5.68.

    `warmup` steps begin with a quarter of the elements and end with the ratio, of a block as ever, and are for CPUs; `clip` shortens each rank's
    gradients to clip / sqrt(N), parameter by parameter, before anything is kept of them. In a run as short as that (200 steps,
    momentum here: .71) both cost: .83 with `warmup=80`, .77 with `clip=2.0`.

    Paper: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018; a warm-up of four epochs.
    """
    codec = Dropping(ratio, warmup, "quarters", "block") if warmup else TopK(ratio, "block")
    return Recipe(Gather(codec), MomentumCorrection(momentum, clip=clip), rules=_vectors(momentum, clip))


@preset
def sketched_sgd(ratio: float = 0.002, candidates: int = 8, momentum: float = 0.0) -> Recipe:
    """The largest elements of the sum, found in a sketch of it and fetched exactly; vectors travel whole.

    Use: below about 1 Gbit/s, where few elements of a gradient matter: 20 times fewer bytes whatever the number of ranks. With
    `momentum=0.9` and an optimizer that has none it is the paper's.

    Not for: few ranks, among which `topk` says more in fewer bytes, nor gradients without large elements, of which a
    sketch finds noise. Its two messages go one after the other, and it keeps a residual as large as the model.

    In the setting of `dgc`'s figures it ended with a loss of .86, and .90 with momentum here, where `topk` had .66 in four
    fifths of its bytes among 4 ranks; among 16 `topk` sends three times as many.

    Paper: Ivkin et al., Communication-Efficient Distributed SGD with Sketching, NeurIPS 2019.
    """
    exchange = AllReduced(CountSketch(ratio, candidates=candidates))
    return Recipe(exchange, MomentumCorrection(momentum), rules=_vectors(momentum))


def _vectors(momentum: float, clip: float | None = None) -> tuple[Rule, ...]:
    """Biases and norms, one in a hundred parameters or fewer, travel whole."""
    kept = MomentumCorrection(momentum, masking=False, clip=clip) if momentum or clip else NoMemory()
    return (Rule("ndim < 2", DENSE, kept),)


@preset
def fetchsgd(ratio: float = 0.002, momentum: float = 0.0) -> Recipe:
    """Sketches of gradients, and nothing kept that is not the same on all ranks.

    Use: where ranks can keep nothing of their own from one step to the next: 20 times fewer bytes whatever the number of ranks.

    Not for: ranks that can keep a residual: `sketched_sgd` sends as many bytes and learns faster, since its values are exact.
    Here they are estimates. In the setting of `dgc`'s figures it ended with a loss of 1.00, and with momentum of its own, .9,
    with 1.99.

    Paper: Rothchild et al., FetchSGD: Communication-Efficient Federated Learning with Sketching, ICML 2020.
    """
    return Recipe(FetchSGD(ratio, momentum=momentum))
