"""Presets: one named recipe per paper. `gossamer.recipes.powersgd(rank=4)`, or the text "powersgd(rank=4)"."""

from collections.abc import Callable
from typing import Literal

from gossamer import recipe
from gossamer.codecs import BF16, FP16, FP32, QSGD, PowerSGD, Ternary, TopK
from gossamer.controllers import Accordion, AccordionBatch
from gossamer.core.contracts import Topology
from gossamer.exchanges import AllReduced, First, Gather, PushSum, Scatter
from gossamer.memories import DIANA, ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.schedules import EveryStep, Gossip, LocalSGD, OverlapLocalSGD, SlowMo
from gossamer.topologies import Exponential

_DENSE = AllReduced(FP32())


@preset
def allreduce() -> Recipe:
    """Every gradient, in full: what DDP does, and the yardstick for all else.

    Paper: none; the baseline.
    """
    return Recipe(_DENSE)


@preset
def bf16() -> Recipe:
    """Gradients in 16-bit brain floats, summed in float32.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(BF16()))


@preset
def fp16() -> Recipe:
    """Gradients in half precision, summed in float32.

    Paper: none; half the bytes of full precision.
    """
    return Recipe(Scatter(FP16()))


@preset
def terngrad(clip: float = 2.5, levels: int = 1) -> Recipe:
    """Gradients as -s, 0 or +s, in two phases.

    Paper: Wen et al., TernGrad, NIPS 2017.
    """
    return Recipe(Scatter(Ternary(clip, levels)))


@preset
def qsgd(bits: int = 4, bucket: int = 512, norm: Literal["max", "l2"] = "max") -> Recipe:
    """Gradients in a few bits per element, in two phases.

    Paper: Alistarh et al., QSGD, NIPS 2017.
    """
    return Recipe(Scatter(QSGD(bits, bucket, norm)))


@preset
def topk(ratio: float = 0.01, scope: Literal["tensor", "global"] = "tensor") -> Recipe:
    """The largest one percent of a gradient, and error feedback for the rest.

    Paper: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017.
    """
    return Recipe(Gather(TopK(ratio, scope)), ErrorFeedback())


@preset
def powersgd(rank: int = 2) -> Recipe:
    """Low-rank gradients by warm-started power iteration, with error feedback.

    Paper: Vogels, Karimireddy, Jaggi, PowerSGD, NeurIPS 2019.
    """
    return Recipe(AllReduced(PowerSGD(rank)), ErrorFeedback())


@preset
def diana(bits: int = 2, bucket: int = 512, momentum: float = 0.0, l1: float = 0.0) -> Recipe:
    """Quantised differences to learned gradients: exact in the limit where quantised gradients stall.

    Paper: Mishchenko, Gorbunov, Takac, Richtarik, Distributed Learning with Compressed Gradient Differences, 2019.
    """
    return Recipe(Gather(QSGD(bits, bucket)), DIANA(momentum=momentum), EveryStep(l1=l1))


@preset
def local_sgd(every: int = 8) -> Recipe:
    """Local steps, and an average of the models every now and then.

    Paper: Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.
    """
    return Recipe(_DENSE, schedule=LocalSGD(every))


@preset
def slowmo(every: int = 12, beta: float = 0.7, alpha: float = 1.0) -> Recipe:
    """Local steps, an average, and slow momentum over the rounds.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(_DENSE, schedule=SlowMo(every, beta, alpha))


@preset
def slowmo_sgp(every: int = 48, beta: float = 0.7, topology: Topology = Exponential()) -> Recipe:  # noqa: B008
    """Stochastic gradient push, with an exact average and slow momentum over the rounds.

    Paper: Wang, Tantia, Ballas, Rabbat, SlowMo, ICLR 2020.
    """
    return Recipe(_DENSE, schedule=SlowMo(every, beta, inner=PushSum(topology)))


@preset
def overlap_local_sgd(every: int = 8, alpha: float = 0.6, beta: float = 0.7) -> Recipe:
    """Local steps while the last average is still travelling.

    Paper: Wang, Liang, Joshi, Overlap Local-SGD, ICASSP 2020.
    """
    return Recipe(_DENSE, schedule=OverlapLocalSGD(every, alpha, beta))


@preset
def sgp(topology: Topology = Exponential(), every: int = 1, overlap: bool = False) -> Recipe:  # noqa: B008
    """Stochastic gradient push: mix parameters with one neighbour a step.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return Recipe(PushSum(topology), schedule=Gossip(every, overlap))


@preset
def osgp(topology: Topology = Exponential(), every: int = 1) -> Recipe:  # noqa: B008
    """Stochastic gradient push whose messages travel while the next steps are computed.

    Paper: Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019.
    """
    return sgp(topology, every, overlap=True)


@preset
def backup(backups: int = 1) -> Recipe:
    """Synchronous training that does not wait for the latest gradients.

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """
    return Recipe(First(backups))


@preset
def accordion(epoch: int, mild: int = 4, harsh: int = 1, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """PowerSGD with a high rank in critical regimes and a low one elsewhere.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = AllReduced(PowerSGD(mild)), AllReduced(PowerSGD(harsh))
    return Recipe(low, ErrorFeedback(), controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_qsgd(epoch: int, mild: int = 8, harsh: int = 4, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """QSGD with more bits in critical regimes and fewer elsewhere.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = Scatter(QSGD(mild)), Scatter(QSGD(harsh))
    return Recipe(low, controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_batch(epoch: int, factor: int = 8, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """A batch that grows once training leaves its critical regimes.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    return Recipe(_DENSE, controller=AccordionBatch(factor, epoch, interval, threshold))


def presets() -> dict[str, Callable[..., Recipe]]:
    """All presets, by name."""
    return dict(recipe.presets)
