"""Floor 5: a recipe bound to the parameters of one rank; it knows nothing of processes."""

from gossamer.core.halves import rest, until_descend
from gossamer.worker import checkpoint
from gossamer.worker.channels import Channel
from gossamer.worker.heterogeneity import Heterogeneity, gradients_of, heterogeneity
from gossamer.worker.leaves import Leaf, Plain, leaves_of
from gossamer.worker.optimizers import Together
from gossamer.worker.worker import Worker

__all__ = [
    "Channel",
    "Heterogeneity",
    "Leaf",
    "Plain",
    "Together",
    "Worker",
    "checkpoint",
    "gradients_of",
    "heterogeneity",
    "leaves_of",
    "rest",
    "until_descend",
]
