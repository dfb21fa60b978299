"""Steps that do not wait for all ranks."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import BackupWorkers, OnArrival


@preset
def backup(backups: int = 1) -> Recipe:
    """Full gradients of all ranks except the `backups` slowest ones, which each step drops.

    Use: where any machine may be slow for a while: the others do not wait for it.

    Not for: saving bytes, slow links or dead processes: it hides slow computation only. If all machines are equally fast,
    gradients are dropped for nothing; if one is always last, its data is never learned.

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """
    return Recipe(DENSE, schedule=BackupWorkers(backups))


@preset
def async_sgd(by_staleness: bool = False) -> Recipe:
    """Asynchronous SGD: a server adds each rank's step to the model on arrival, however stale it is.

    Use: as the baseline of `backup`, whose paper argues against it; among ranks of varying speed with fast links. Tune the
    learning rate for it: each step counts in full, where an average divides by the number of ranks.

    Not for: slow links: all traffic crosses the link of the last rank, which keeps the model. Nor runs that must be
    reproducible to the bit.

    Paper: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012.
    """
    return Recipe(DENSE, schedule=OnArrival(by_staleness))
