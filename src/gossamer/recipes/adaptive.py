"""Adaptive recipes: controllers that change the compression or the batch size during training."""

from gossamer.codecs import QSGD, PowerSGD, TopK
from gossamer.controllers import Accordion, AccordionBatch, Auto
from gossamer.controllers.auto_table import ALLOWED
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.memories import ErrorFeedback
from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE


@preset
def accordion(epoch: int, mild: int = 4, harsh: int = 1, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """PowerSGD with a high rank in critical regimes and a low one elsewhere.

    Use: where a low rank costs quality, or the right rank is unknown: the rank is high while gradients change fast and low
    elsewhere, for each parameter.

    Not for: short runs: the first decision comes after `interval` + 1 epochs, and compression is mild until then. The bytes
    counted are those of the mild level.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = AllReduced(PowerSGD(mild)), AllReduced(PowerSGD(harsh))
    return Recipe(low, ErrorFeedback(), controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_qsgd(epoch: int, mild: int = 8, harsh: int = 4, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """QSGD with more bits in critical regimes and fewer elsewhere.

    Use: where few bits cost quality, or the right number of bits is unknown: `accordion` without matrix products and
    without a residual.

    Not for: short runs: the first decision comes after `interval` + 1 epochs, and compression is mild until then. The bytes
    counted are those of the mild level.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    low, high = Scatter(QSGD(mild)), Scatter(QSGD(harsh))
    return Recipe(low, controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_topk(
    epoch: int, mild: float = 0.1, harsh: float = 0.01, interval: int = 10, threshold: float = 0.5
) -> Recipe:
    """Top-k with a higher ratio in critical regimes and a lower one elsewhere.

    Use: where one percent costs quality, or the right ratio is unknown: `accordion` for gradients with few large elements.

    Not for: short runs: the first decision comes after `interval` + 1 epochs, and compression is mild until then. The bytes
    counted are those of the mild level. Nor many ranks: bytes grow with their number.

    Paper: Agarwal et al., Accordion, MLSys 2021; its levels are 99 percent and 10, or 2 for a language model.
    """
    low, high = Gather(TopK(mild, "block")), Gather(TopK(harsh, "block"))
    return Recipe(low, ErrorFeedback(), controller=Accordion(low, high, epoch, interval, threshold))


@preset
def accordion_batch(epoch: int, factor: int = 8, interval: int = 10, threshold: float = 0.5) -> Recipe:
    """Full gradients of a batch that grows once training leaves its critical regimes.

    Use: where large batches train well later but not at first: once the batch has grown, one exchange serves `factor` times
    as many samples.

    Not for: short runs: until the first decision, after `interval` + 1 epochs at the earliest, it sends as many bytes as
    dense, and those are the bytes counted. The batch never shrinks again, and the learning rate grows with it; the training
    loop must read `comm.accumulate`.

    Paper: Agarwal et al., Accordion, MLSys 2021.
    """
    return Recipe(DENSE, controller=AccordionBatch(factor, epoch, interval, threshold))


@preset
def auto(
    allow: tuple[str, ...] = ALLOWED, gain: float = 0.1, steps: int | None = None, replay: str | None = None
) -> Recipe:
    """Dense averages, and one of `allow` instead where it is measured to be faster.

    Use: where nobody wants to choose: it measures this run, tries what promises to be faster, and says what it chose and why.
    `steps` is the length of the run, if known. See docs/auto.md for what it may choose and what its guards catch.

    Not for: runs of fewer than a few hundred steps; results that must be the same in every run, unless by `replay` of a ledger. The
    bytes counted are dense's.

    Paper: none.
    """
    return Recipe(DENSE, controller=Auto(allow, gain, steps, replay))
