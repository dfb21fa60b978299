"""Scaling: the seconds of a step on clusters of more and of fewer hosts than one asks about."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gossamer.core.errors import CostError, GossamerError
from gossamer.costs import Cluster
from gossamer.planning.baselines import baselines, sharded
from gossamer.planning.model_cost import ModelCost
from gossamer.planning.plan import line_up, prepare, work_of
from gossamer.planning.work import WorkSource
from gossamer.recipe import Recipe


class Scaling(NamedTuple):
    """The step's seconds of each baseline and recipe, by number of hosts; and why a recipe has none."""

    seconds: Mapping[str, Mapping[int, float]]
    refused: Mapping[str, str]


def of_hosts(cluster: Cluster, count: int) -> Cluster:
    """The same cluster with another number of hosts."""
    host, *others = cluster.hosts
    if others:
        raise CostError(
            "this cluster has unlike groups of hosts, so a plan cannot tell which of them to add: give one group"
        )
    return replace(cluster, hosts=(replace(host, count=count),))


def scaling(
    model: ModelCost,
    cluster: Cluster,
    hosts: Sequence[int],
    recipes: Sequence["str | Recipe"] = (),
    *,
    work: WorkSource | None = None,
    accumulate: int = 4,
    shards: int = 1,
) -> Scaling:
    """Plan baselines and recipes with each of these numbers of hosts.

    Every rank's batch stays what it is, so that twice as many hosts do twice as much in a step.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import known_model
    >>> here = from_flags(nodes=2, gpus=1, rate=125e6)
    >>> found = scaling(known_model("gpt2", 0.35), here, [2, 64], ["topk", "sparse_scatter"]).seconds
    >>> found["topk"][64] > 5 * found["sparse_scatter"][64]  # a gather grows with the number of ranks
    True
    """
    work, model = work or work_of(cluster), model.at_speed(cluster.speed)
    out, refused = dict[str, dict[int, float]](), dict[str, str]()
    for count in sorted({*hosts}):
        there = of_hosts(cluster, count)
        if there.size // shards < 2:
            raise CostError(
                f"{count} host(s) of {cluster.ranks_per_node} rank(s) have nobody to send to: plan at least two replicas"
            )
        for baseline in baselines(model, there, accumulate, shards):
            out.setdefault(baseline.name, {})[count] = baseline.seconds(there).step
        mine = sharded(model, there, shards) if shards > 1 else model
        for recipe in recipes or line_up(1 if shards > 1 else cluster.ranks_per_node):
            row = out.setdefault(str(recipe), {})
            try:
                row[count] = prepare(recipe, mine, there, work, shards).seconds(there).step
            except GossamerError as error:
                refused[str(recipe)] = str(error)
    return Scaling(out, refused)
