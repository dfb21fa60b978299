"""Waiting for fewer than all, or for nobody."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import BackupWorkers, OnArrival


@preset
def backup(backups: int = 1) -> Recipe:
    """Synchronous training that does not wait for the latest gradients.

    Use: where machines are slow now and then, each in its turn: nobody waits for the latest.

    Not for: saving bytes, slow links or dead processes: it hides slow computing only. If machines are all alike,
    gradients are dropped for nothing; if one is always last, its data is never learned.

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """
    return Recipe(DENSE, schedule=BackupWorkers(backups))


@preset
def async_sgd(by_staleness: bool = False) -> Recipe:
    """Asynchronous SGD: a server adds each rank's step to the model as it arrives, however old the model that it began at.

    Use: as the baseline of `backup`, whose paper argues against it; among ranks of moody speed behind fast links. Tune the
    learning rate for it: each step counts in full, where an average divides by the number of ranks.

    Not for: slow links: all passes that of the last rank, which keeps the model; nor runs that must repeat themselves to the bit.

    Paper: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012.
    """
    return Recipe(DENSE, schedule=OnArrival(by_staleness))
