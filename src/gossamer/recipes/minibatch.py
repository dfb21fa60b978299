"""Minibatch SGD and its relatives: few communication rounds, for ranks with different data."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import Accelerated, EveryStep, InnerOuter


@preset
def minibatch(micro_batches: int = 8) -> Recipe:
    """Gradient accumulation: several micro-batches, then one exchange and one step.

    Use: where ranks' data differ so much that local steps drift apart, and memory holds small batches only. The learning rate
    may grow with the batch: `every_step(micro_batches=8, rate=8.0)`.

    Not for: ranks with similar data: there local steps learn more from the same number of gradients.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=EveryStep(micro_batches))


@preset
def accelerated(micro_batches: int = 8) -> Recipe:
    """Accelerated minibatch SGD: gradient accumulation with accelerated steps (AC-SA), for convex problems.

    Use: on convex problems with few rounds, under plain SGD. Differences between the ranks' data do not slow it down. Evaluate
    and save the model under `comm.consensus()`.

    Not for: deep networks, momentum or Adam.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=Accelerated(micro_batches))


@preset
def inner_outer(every: int = 8, inner: float = 0.5) -> Recipe:
    """Local steps with a smaller learning rate, then one outer step with the full rate.

    Use: between `minibatch` and `local_sgd`, where ranks' data differ somewhat. With both rates tuned it beat both of them in
    the table of the documentation.

    Not for: machines with little memory: it keeps two more copies of the model.

    Paper: Woodworth, Patel, Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020.
    """
    return Recipe(DENSE, schedule=InnerOuter(every, inner))
