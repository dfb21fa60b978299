"""Waiting for fewer than all."""

from gossamer.recipe import Recipe, preset
from gossamer.recipes.dense import DENSE
from gossamer.schedules import BackupWorkers


@preset
def backup(backups: int = 1) -> Recipe:
    """Synchronous training that does not wait for the latest gradients.

    Use: where machines are slow now and then, each in its turn: nobody waits for the latest.

    Not for: saving bytes, slow links or dead processes: it hides slow computing only. If machines are all alike,
    gradients are dropped for nothing; if one is always last, its data is never learned.

    Paper: Chen, Pan, Monga, Bengio, Jozefowicz, Revisiting Distributed Synchronous SGD, 2016.
    """
    return Recipe(DENSE, schedule=BackupWorkers(backups))
