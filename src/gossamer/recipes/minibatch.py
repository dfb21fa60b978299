"""Few rounds, for ranks whose data differ."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import Accelerated, EveryStep, InnerOuter


@preset
def minibatch(micro_batches: int = 8) -> Recipe:
    """Many gradients at one point, then one step: synchronous training of a batch so many times as large.

    Use: ranks whose data differ so much that local steps drift apart, and memory for small batches only. The rate may grow
    with the batch: `every_step(micro_batches=8, rate=8.0)`.

    Not for: ranks with data alike: local steps make more of as many gradients.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=EveryStep(micro_batches))


@preset
def accelerated(micro_batches: int = 8) -> Recipe:
    """Accelerated minibatch SGD: many gradients at one point, and three sequences that make more of few rounds.

    Use: convex problems of few rounds, under plain SGD: how unlike the ranks' data are does not matter to it. Judge and keep
    the model of `comm.consensus()`.

    Not for: deep networks, momentum or Adam.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=Accelerated(micro_batches))


@preset
def inner_outer(every: int = 8, inner: float = 0.5) -> Recipe:
    """Local steps of a smaller rate, and a step of the full rate over the round.

    Use: between `minibatch` and `local_sgd`, where data differ somewhat; with both rates tuned it beat both in the table of
    the documentation.

    Not for: machines short of memory: it keeps two more copies of the model.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=InnerOuter(every, inner))
