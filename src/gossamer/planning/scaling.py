"""Scaling: the seconds of a step on clusters of more and of fewer hosts than one asks about."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gossamer.core.errors import CostError
from gossamer.costs import Cluster
from gossamer.costs.laws import SlowRank
from gossamer.planning.plan import TrainingPlan


class Scaling(NamedTuple):
    """The step's seconds of each baseline and recipe, by number of hosts; and why a recipe has none."""

    seconds: Mapping[str, Mapping[int, float]]
    refused: Mapping[str, str]


def scaling(cluster: Cluster, hosts: Sequence[int], planned: Callable[[Cluster], TrainingPlan]) -> Scaling:
    """Plan with each of these numbers of hosts, where every rank's batch stays what it is.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import known_model
    >>> from gossamer.planning.plan import plan
    >>> gpt2, here = known_model("gpt2", 0.35), from_flags(nodes=2, gpus=1, rate=125e6)
    >>> found = scaling(here, [2, 64], lambda there: plan(gpt2, there, ["topk", "sparse_scatter"], curves=False)).seconds
    >>> found["topk"][64] > 5 * found["sparse_scatter"][64]  # a gather grows with the number of ranks
    True
    """
    seconds, refused = dict[str, dict[int, float]](), dict[str, str]()
    for count in sorted({*hosts}):
        found = planned(of_hosts(cluster, count))
        for row in (*found.baselines, *found.recipes):
            if row.seconds is None:
                refused[row.name] = row.error
            else:
                seconds.setdefault(row.name, {})[count] = row.seconds.step
    return Scaling(seconds, refused)


def of_hosts(cluster: Cluster, count: int) -> Cluster:
    """The same cluster with another number of hosts; of fewer, a rank that is slow is still one."""
    host, *others = cluster.hosts
    if others:
        raise CostError(
            "this cluster has unlike groups of hosts, so a plan cannot tell which of them to add: give one group"
        )
    law = cluster.law
    if isinstance(law, SlowRank):
        law = replace(law, rank=min(law.rank, count * host.ranks - 1))
    return replace(cluster, hosts=(replace(host, count=count),), law=law)
