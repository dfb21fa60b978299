"""Runs a recipe on the parameters of one rank, independently of processes and networks."""

from gossamer.runtime.buckets import BucketState
from gossamer.runtime.heterogeneity import Heterogeneity, gradients_of, heterogeneity
from gossamer.runtime.optimizers import Together
from gossamer.runtime.params import Param, Plain, Sharded, is_sharded, local_part, params_of
from gossamer.runtime.replica import ReplicaRanks, WholeReplica
from gossamer.runtime.worker import Worker

__all__ = [
    "BucketState",
    "Heterogeneity",
    "Param",
    "Plain",
    "ReplicaRanks",
    "Sharded",
    "Together",
    "WholeReplica",
    "Worker",
    "gradients_of",
    "heterogeneity",
    "is_sharded",
    "local_part",
    "params_of",
]
