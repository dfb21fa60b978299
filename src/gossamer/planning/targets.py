"""What keeps machines busy for some share of the time: the rate of a link, the length of a round, or the number of ranks."""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from gossamer.costs import Cluster
from gossamer.planning.plan import Row, TrainingPlan
from gossamer.planning.rates import BUSY
from gossamer.planning.scaling import of_hosts

Target = Literal["rate", "every", "ranks"]
HOSTS = tuple(2**i for i in range(1, 11))  # numbers of hosts that are tried


class Reached(NamedTuple):
    """For each recipe, by share of the time: the lowest rate in bytes a second, the shortest round, or the most ranks.

    A share that a recipe does not reach is left out; `refused` says why a recipe has none at all.
    """

    values: Mapping[str, Mapping[float, float]]
    refused: Mapping[str, str]


def reached(target: Target, cluster: Cluster, planned: Callable[[Cluster], TrainingPlan]) -> Reached:
    """What each recipe needs, all else as in the cluster; every rank's batch stays what it is.

    >>> from gossamer.costs import from_flags
    >>> from gossamer.planning.model_shapes import known_model
    >>> from gossamer.planning.plan import plan
    >>> gpt2, here = known_model("gpt2", 0.35), from_flags(nodes=2, gpus=1, rate=125e6)
    >>> def planned(there): return plan(gpt2, there, ["local_sgd(8)"], curves=False)
    >>> found = reached("every", here, planned).values["local_sgd(8)"]
    >>> found[0.5] < found[0.9] < found[0.99]
    True
    """
    if target == "ranks":
        return _most_ranks(cluster, planned)
    values, refused = dict[str, dict[float, float]](), dict[str, str]()
    found = planned(cluster)
    asked = [] if target == "every" else [row for row in found.baselines if row.name != "compute"]
    for row in (*asked, *found.recipes):
        if why := row.error or _without(target, row):
            refused[row.name] = why
        else:
            values[row.name] = dict(row.busy_at if target == "rate" else row.rounds)
    return Reached(values, refused)


def _without(target: Target, row: Row) -> str:
    if target == "rate" and row.simulated:
        return "a simulation takes seconds, so it is not repeated at other rates"
    if target == "every" and row.simulated:
        return "its ranks do not all wait for the slowest, so it has no one length of a round at which they are busy"
    if target == "every" and not row.rounds:
        return "it has no rounds whose length is free"
    return ""


def _most_ranks(cluster: Cluster, planned: Callable[[Cluster], TrainingPlan]) -> Reached:
    values, refused = dict[str, dict[float, float]](), dict[str, str]()
    for count in HOSTS:
        there = of_hosts(cluster, count)
        found = planned(there)
        for row in (*found.baselines, *found.recipes):
            if row.seconds is None:
                refused[row.name] = row.error
            elif row.name != "compute":
                mine = values.setdefault(row.name, {})
                mine |= {share: there.size for share in BUSY if row.seconds.utilisation >= share}
    return Reached(values, {name: why for name, why in refused.items() if name not in values})
