"""The largest elements of gradients, or a sketch of them."""

from typing import Literal

from gossamer.codecs import CountSketch, Dropping, TopK
from gossamer.exchanges import AllReduced, FetchSGD, Gather
from gossamer.memories import ErrorFeedback, MomentumCorrection, NoMemory, OwnGradient
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.rules import Rule
from gossamer.schedules import Resync


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
    return (Rule("ndim < 2", DENSE, MomentumCorrection(momentum, masking=False) if momentum else NoMemory()),)


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
