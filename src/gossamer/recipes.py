"""Presets: one named recipe per paper. `gossamer.recipes.powersgd(rank=4)`, or the text "powersgd(rank=4)"."""

from collections.abc import Callable
from typing import Literal

from gossamer import recipe
from gossamer.codecs import BF16, FP16, FP32, QSGD, SVD, Atomo, Basis, CountSketch, Dropping, PowerSGD, Ternary, TopK
from gossamer.controllers import DQSGD, Accordion, AccordionBatch
from gossamer.core.contracts import Topology
from gossamer.exchanges import AllReduced, FetchSGD, Gather, Scatter
from gossamer.memories import DIANA, ErrorFeedback, MomentumCorrection, NoMemory, OwnGradient
from gossamer.mixers import PushSum
from gossamer.recipe import Recipe, preset
from gossamer.rules import Rule
from gossamer.schedules import EveryStep, First, Gossip, LocalSGD, OverlapLocalSGD, Resync, SlowMo
from gossamer.topologies import Exponential

_DENSE = AllReduced(FP32())


@preset
def allreduce() -> Recipe:
    """Every gradient, in full: what DDP does, and the yardstick for all else.

    Use: on links so fast that the all-reduce hides behind backward, and as the baseline of every comparison: it
    loses nothing.

    Not for: links on which it does not hide. Four hosts at 200 Mbit/s spent nine tenths of each step waiting for
    it.

    Paper: none; the baseline.
    """
    return Recipe(_DENSE)


@preset
def bf16() -> Recipe:
    """Gradients in 16-bit brain floats, summed in float32.

    Use: below about 10 Gbit/s, as the first thing to try: half the bytes, nothing to tune, and next to no loss.

    Not for: links below 1 Gbit/s, which need more than half, nor ranks on one machine, where converting costs what
    it saves.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(BF16()))


@preset
def fp16() -> Recipe:
    """Gradients in half precision, summed in float32.

    Use: in place of `bf16` where three more bits of precision matter and gradients stay small.

    Not for: gradients beyond 65504, to which a large loss scale is enough: they become inf, and the step is
    skipped.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(FP16()))


@preset
def terngrad(
    clip: float = 2.5, levels: int = 1, last: Literal["ternary", "qsgd", "bf16", "fp32"] = "ternary"
) -> Recipe:
    """Gradients as -s, 0 or +s, and their mean in three bits.

    Use: below about 1 Gbit/s: 14 times fewer bytes whatever the number of ranks, quick to write, and no residual to
    keep. For classifiers and language models write `terngrad(last="qsgd")`: the layer that predicts in 4 bits.

    Not for: links on which dense hides behind backward, nor, without `last`, models of many classes or words: their
    last layer's gradients lie in few rows, and of those clipping leaves a fifth.

    All the steps that it costs, the last layer costs. A Transformer of 5.8 million parameters on four ranks (`lm`, dense
    after 50 steps: 5.049) was at 5.303 after 50 steps and took 82 to dense's loss, with 13.7 times fewer bytes; with `last="qsgd"`
    (the head in 4 bits) at 5.059, 12.9 times; with `last="fp32"`, which is the paper's own choice, at 5.052, 6.4 times, since that
    head is a tenth of the model. A small one (dense 5.288): 5.550, and with a wider clip of 4 5.477, without clipping 5.390, with
    `levels=3` 5.551; with the head in 3, 4, 16 or 32 bits 5.305, 5.290, 5.289, 5.289. So more levels, and a wider clip, are no cure.
    Small tensors go dense by a rule of your own, as TernGrad's authors did: `terngrad + rule('numel < 9217', allreduce(fp32()))`.

    The second phase encodes the mean again, with `qsgd` of one bit more than the messages. As ternary values as well,
    `scatter(ternary())`, it is 20 times shorter than dense and the mean is clipped twice and noisier: on Gaussian
    gradients of 8 ranks the relative variance is 2.7, in three bits 1.25, unencoded .88, and 1.0 on shared scales
    (`allreduce(ternary())`). A small Transformer on four ranks had a loss of 5.06 after 100 steps in ternary values,
    4.95 in three bits, 4.94 unencoded; dense had 5.05 after 50.

    Paper: Wen et al., TernGrad, NIPS 2017.
    """
    bits = min((2 * levels).bit_length() + 1, 8)
    ways = {"qsgd": Scatter(QSGD(4)), "bf16": Scatter(BF16()), "fp32": _DENSE}
    rules = (Rule("last", ways[last]),) if last != "ternary" else ()
    return Recipe(Scatter(Ternary(clip, levels), answer=QSGD(bits)), rules=rules)


@preset
def qsgd(bits: int = 4, bucket: int = 512, norm: Literal["max", "l2"] = "max") -> Recipe:
    """Gradients in a few bits per element, in two phases.

    Use: below about 1 Gbit/s where `terngrad` is too coarse: 8 times fewer bytes at 4 bits whatever the number of
    ranks, unbiased, and no residual to keep.

    Not for: links on which dense hides behind backward. Below 4 bits its noise grows fast and costs steps: then
    take more bits or smaller buckets.

    The second phase encodes the mean again. At 4 bits that doubles a small variance (Gaussian gradients of 8 ranks: .07
    instead of .03) and cost no steps: a small Transformer on four ranks had a loss of 4.78 after 100, dense 4.77.

    Paper: Alistarh et al., QSGD, NIPS 2017.
    """
    return Recipe(Scatter(QSGD(bits, bucket, norm)))


@preset
def dqsgd(steps: int, bits: float = 3.0, per: Literal["model", "layer"] = "layer") -> Recipe:
    """Quantised gradients, in as many bits as each layer and each step is worth: `bits` on average.

    Use: in place of `qsgd` where the number of steps is known: a small Transformer on four ranks lost nothing at 3 bits
    (4.971 after 100 steps, as dense; 10.4 times fewer bytes), and little at 2.5 (4.984; 12.5 times); `qsgd` was at 4.993 with 3 bits
    (10.4 times) and at 5.120 with 2 (15.5 times), and needs 4 to lose nothing (7.9 times).

    Not for: runs whose length nobody knows. `per="model"`, one width for all layers, gained nothing at 3 bits, where it never
    turned, and at 2.5 (5.044) less than layers did: it is for models of one layer, and for gradients that shrink much. It takes two
    more passes over the gradient at each step.

    Paper: Yan, Huang, Lan, Song, DQ-SGD, 2021.
    """
    return Recipe(Scatter(QSGD(max(2, min(8, round(bits))))), controller=DQSGD(steps, bits, per=per))


@preset
def topk(ratio: float = 0.01, scope: Literal["tensor", "global"] = "tensor") -> Recipe:
    """The largest one percent of a gradient, and error feedback for the rest.

    Use: below about 1 Gbit/s between few ranks, where few elements of a gradient matter; the others are sent later.

    Not for: many ranks: everybody reads everybody's message, so bytes grow with their number, and from 100 ranks on
    one percent is more than dense; `scatter(topk()) + error_feedback()` does not grow. It keeps a residual as large
    as the model.

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017.
    """
    return Recipe(Gather(TopK(ratio, scope)), ErrorFeedback())


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

    `warmup` drops less at first, and is for CPUs. `sync="flush"` pays all debts exactly, and takes plain SGD.

    Paper: Aji, Heafield, Bogoychev, Combining Global Sparse Gradients with Local Gradients in Distributed Neural Network
    Training, EMNLP 2019; 99 percent dropped, a warm-up of 1000 steps, averages every 500.
    """
    codec = Dropping(ratio, warmup) if warmup else TopK(ratio)
    memory = OwnGradient(mode, "gradient" if sync == "average" else "update")
    return Recipe(Gather(codec), memory, Resync(every, sync))


@preset
def dgc(ratio: float = 0.001, momentum: float = 0.0) -> Recipe:
    """The largest element in a thousand, with momentum kept where the gradient is; vectors travel whole.

    Use: below about 1 Gbit/s between few ranks: the fewest bytes of all presets on up to 7. With `momentum=0.9` and an
    optimizer that has none it is the paper's; without, the optimizer keeps its own, and this is error feedback.

    Not for: many ranks: everybody reads everybody's message, so bytes grow with their number, and with a thousand they are
    dense's. Nor short runs: an element waits for hundreds of steps. It keeps a residual as large as the model, and with momentum
    another.

    A small network on Fashion-MNIST (lr .02, 4 ranks, 240 steps, one seed) ended with a loss of .49 dense, .66 under `topk`, .79
    under `dgc` with momentum in the optimizer and .66 with it here, in an eighth of `topk`'s bytes.

    Paper: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018.
    """
    return Recipe(Gather(TopK(ratio)), MomentumCorrection(momentum), rules=_vectors(momentum))


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


def _vectors(momentum: float) -> tuple[Rule, ...]:
    """Biases and norms, one in a hundred parameters or fewer, travel whole."""
    return (Rule("ndim < 2", _DENSE, MomentumCorrection(momentum, masking=False) if momentum else NoMemory()),)


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


@preset
def powersgd(rank: int = 4) -> Recipe:
    """Low-rank gradients by warm-started power iteration, with error feedback.

    Use: below about 1 Gbit/s, on models of large matrices: bytes do not grow with the number of ranks, and from 8 on no
    preset sends fewer.

    Not for: models of vectors and small matrices, which travel as they are, nor busy processors: it multiplies
    matrices at every step. It keeps a residual as large as the model. Ranks below 4 send less but learned so much
    slower at first, on a small Transformer, that it did not pay. Where quality suffers, take a higher one, or
    `accordion`.

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019.
    """
    return Recipe(AllReduced(PowerSGD(rank)), ErrorFeedback())


@preset
def atomo(basis: Basis = SVD(), share: float = 0.05) -> Recipe:  # noqa: B008
    """A few directions of each matrix, kept at random, and their mean in four bits.

    Use: below about 1 Gbit/s, on models of matrices, where nothing may be biased nor kept: there is no residual, as
    `powersgd` has one. Bytes stay what they are while a rank's chunk holds some rows of a matrix.

    Not for: models of vectors, which travel as they are, nor busy processors: it multiplies matrices at every step; nor
    many ranks for a small model: a chunk of less than eight rows is no matrix, and bytes grow with their number. Where a
    residual is no trouble, `powersgd` sends less and learns as fast.

    The second phase encodes the mean again, with `qsgd` of four bits, for its noise shrinks in no mean. `fashion` on four
    simulated ranks, one seed, 120 steps: loss .65 with 100 kB a step from each rank, as `qsgd` had with 158 and dense .61
    with 1,242; with directions in the answer as well, `scatter(atomo(svd(), share=0.05))`, 1.01 with 43. Among few ranks
    `gather(atomo(svd(), atoms=3))` is shorter: .65 with 75; `powersgd`: .64 with 50. In entries, `atomo(entry())`, chunks
    of a small model have room for more: .58 with 110 kB after 80 steps against .73 with 100; `lm` had the same loss in
    both after 14, 5.92 and 5.94.

    Paper: Wang et al., ATOMO, NeurIPS 2018.
    """
    return Recipe(Scatter(Atomo(basis, share=share), answer=QSGD()))


@preset
def diana(bits: int = 2, bucket: int = 512, momentum: float = 0.0, l1: float = 0.0) -> Recipe:
    """Quantised differences to learned gradients: exact in the limit where quantised gradients stall.

    Use: on convex problems with full or large batches, where the exact optimum is wanted: quantised gradients alone
    stall before it.

    Not for: small noisy batches, which stall by themselves, nor many ranks: it gathers, so bytes grow with their
    number, and from 32 ranks on two bits are more than dense; `scatter(qsgd(bits=2)) + diana()` does not grow. It
    keeps two copies of the gradient.

    Paper: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019.
    """
    return Recipe(Gather(QSGD(bits, bucket)), DIANA(momentum=momentum), EveryStep(l1=l1))


@preset
def dqgd(bits: int = 2, bucket: int = 512, start: Literal["zero", "first"] = "zero") -> Recipe:
    """Quantised full gradients without a memory that learns: the baseline that `diana` is measured against.

    Use: to see what `diana` gains, on convex problems with full gradients. `start="first"` sends differences to the
    first gradients, which travel in full, once.

    Not for: results: it stalls where quantisation noise meets the step size. On four unlike logistic problems it ended
    at a squared distance of .09 from the optimum, with `start="first"` at .15; `diana` went on to 2e-30. As
    under `diana`, bytes grow with their number where ranks are many.

    Paper: Khirirat, Feyzmahdavian, Johansson, Distributed Learning with Compressed Gradients, 2018.
    """
    return Recipe(Gather(QSGD(bits, bucket)), DIANA(alpha=0.0, start=start))


@preset
def local_sgd(every: int = 8) -> Recipe:
    """Local steps, and an average of the models every now and then.

    Use: on links of high latency, and where even compressed gradients are too much at every step: both costs shrink
    `every` times.

    Not for: links on which dense hides behind backward, as an average of models cannot. Models drift apart between
    averages, the further the more the ranks' data differ: then take fewer steps.

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """
    return Recipe(_DENSE, schedule=LocalSGD(every))


@preset
def slowmo(every: int = 12, beta: float = 0.7, alpha: float = 1.0) -> Recipe:
    """Local steps, an average, and slow momentum over the rounds.

    Use: across sites and on slow links: messages are rare, and momentum wins back what local steps lose. It takes a
    codec as well: `slowmo + scatter(qsgd())`.

    Not for: links on which dense hides behind backward, as an average of models cannot, nor machines short of
    memory: it keeps two more copies of the model.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(_DENSE, schedule=SlowMo(every, beta, alpha))


@preset
def slowmo_sgp(every: int = 48, beta: float = 0.7, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """Stochastic gradient push, with an exact average and slow momentum over the rounds.

    Use: among many ranks that should not wait for all others at every step, but agree exactly now and then.

    Not for: saving bytes: a whole model still travels to a neighbour at every step. With two ranks gossip is an
    average of everybody, and gains nothing.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(_DENSE, schedule=SlowMo(every, beta, inner=PushSum(topology)))


@preset
def overlap_local_sgd(every: int = 8, alpha: float = 0.6, beta: float = 0.7) -> Recipe:
    """Local steps while the last average is still travelling.

    Use: where an average takes as long as a few local steps, as over one slow link: it travels while they are
    computed, and nobody waits.

    Not for: networks slower than a round, nor a learning rate left as it was: the model moves (1 - alpha) / (1 -
    alpha beta) times as fast, 0.69 by default. The average is a round old.

    Paper: Wang, Liang, Joshi, Overlap Local-SGD, ICASSP 2020.
    """
    return Recipe(_DENSE, schedule=OverlapLocalSGD(every, alpha, beta))


@preset
def sgp(topology: Topology = Exponential(), every: int = 1, overlap: bool = False) -> Recipe:  # noqa: B008
    """Stochastic gradient push: mix parameters with one neighbour a step.

    Use: among many ranks, where waiting for all at every step hurts: one message to one neighbour, one hop of
    latency, no barrier.

    Not for: a network that is slow everywhere: it still sends at least half of dense's bytes, and four hosts at 200
    Mbit/s took four fifths of dense's time to the same loss, where local steps or top-k took a quarter. The ranks'
    models differ: evaluate under `comm.consensus()`. With two ranks gossip is an average of everybody, and gains
    nothing.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return Recipe(_DENSE, schedule=Gossip(PushSum(topology), every, overlap))


@preset
def osgp(topology: Topology = Exponential(), every: int = 1) -> Recipe:  # noqa: B008
    """Stochastic gradient push whose messages travel while the next steps are computed.

    Use: in place of `sgp` where a link is slow or moody: messages travel while the next steps are computed.

    Not for: saving bytes: it sends what `sgp` does, at least half of dense. What arrives is a round old, and the
    ranks' models differ: evaluate under `comm.consensus()`.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return sgp(topology, every, overlap=True)


@preset
def backup(backups: int = 1) -> Recipe:
    """Synchronous training that does not wait for the latest gradients.

    Use: where machines are slow now and then, each in its turn: nobody waits for the latest.

    Not for: saving bytes, slow links or dead processes: it hides slow computing only. If machines are all alike,
    gradients are dropped for nothing; if one is always last, its data is never learned.

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """
    return Recipe(_DENSE, schedule=First(backups))


@preset
def accordion(epoch: int, mild: int = 4, harsh: int = 1, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """PowerSGD with a high rank in critical regimes and a low one elsewhere.

    Use: where a low rank costs quality, or nobody knows which rank is enough: mild while gradients change fast,
    harsh elsewhere, parameter by parameter.

    Not for: short runs: it decides first after `interval` + 1 epochs, and all is mild until then. The bytes counted
    are those of the mild level.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = AllReduced(PowerSGD(mild)), AllReduced(PowerSGD(harsh))
    return Recipe(low, ErrorFeedback(), controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_qsgd(epoch: int, mild: int = 8, harsh: int = 4, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """QSGD with more bits in critical regimes and fewer elsewhere.

    Use: where few bits cost quality, or nobody knows how many are enough: `accordion` without matrix products and
    without a residual.

    Not for: short runs: it decides first after `interval` + 1 epochs, and all is mild until then. The bytes counted
    are those of the mild level.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = Scatter(QSGD(mild)), Scatter(QSGD(harsh))
    return Recipe(low, controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_topk(
    epoch: int, mild: float = 0.1, harsh: float = 0.01, interval: int = 10, threshold: float = 0.5
) -> Recipe:
    """Top-k that keeps more in critical regimes and less elsewhere.

    Use: where one percent costs quality, or nobody knows how many are enough: `accordion` for gradients of few large
    elements.

    Not for: short runs: it decides first after `interval` + 1 epochs, and all is mild until then. The bytes counted
    are those of the mild level. Nor many ranks: bytes grow with their number.

    Paper: Agarwal et al., Accordion, MLSys 2021; its levels are 99 percent and 10, or 2 for a language model.
    """
    low, high = Gather(TopK(mild)), Gather(TopK(harsh))
    return Recipe(low, ErrorFeedback(), controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_batch(epoch: int, factor: int = 8, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """A batch that grows once training leaves its critical regimes.

    Use: where large batches train well later on but not at first: once the batch has grown, one exchange serves
    `factor` times as many samples.

    Not for: short runs: until it decides, after `interval` + 1 epochs at the earliest, it sends what dense does,
    and those are the bytes counted. The batch never shrinks again, and the learning rate grows with it; the
    training loop must ask `comm.accumulate`.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    return Recipe(_DENSE, controller=AccordionBatch(factor, epoch, interval, threshold))


def presets() -> dict[str, Callable[..., Recipe]]:
    """All presets, by name."""
    return dict(recipe.presets)
