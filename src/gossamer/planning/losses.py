"""What a run costs besides its steps: money, and the time that failures take."""

from dataclasses import dataclass
from math import exp, inf, sqrt

from gossamer.costs import Cluster
from gossamer.planning.replay import StepSeconds
from gossamer.recipe import Recipe
from gossamer.runtime.outlasting import cannot_go_on

HOUR, GIGABYTE = 3600.0, 1e9


@dataclass(frozen=True)
class Money:
    """The price of a step of all hosts: their hours, and what they send."""

    amount: float
    currency: str


def money_of(step: StepSeconds, cluster: Cluster, kept: float | None = None) -> Money | None:
    """The price of one step; of the time that failures take too, where a share `kept` of it counts. None without prices, and
    where failures leave no time.
    """
    if kept == 0:
        return None
    found = [h.price or h.egress for h in cluster.hosts if h.price or h.egress]
    if not found or found[0] is None:
        return None
    amount = 0.0
    for hosts in cluster.hosts:
        hours = 0.0 if hosts.price is None else hosts.price.amount * step.step / HOUR / (kept or 1.0)
        sent = 0.0 if hosts.egress is None else hosts.egress.amount * step.card / GIGABYTE
        amount += hosts.count * (hours + sent)
    return Money(amount, found[0].currency)


def time_kept(recipe: "str | Recipe | None", cluster: Cluster) -> float | None:
    """The share of time whose steps count. None where no host is said to fail.

    A recipe that goes on without a lost host (under `members()`) loses what that host would have done. All others stop, and
    start again from their last checkpoint: DDP too, which is None, and whatever trains on one host alone.
    """
    rate = sum(h.count / h.mtbf for h in cluster.hosts if h.mtbf)
    if not rate:
        return None
    if recipe is not None and cluster.nodes > 1 and not cannot_go_on(Recipe.of(recipe), cluster.ranks_per_node):
        away = sum(h.count * cluster.restart / (h.mtbf + cluster.restart) for h in cluster.hosts if h.mtbf)
        return 1 - away / cluster.nodes
    return restarts_keep(1 / rate, cluster.restart, cluster.checkpoint)


def save_every(between: float, restart: float, save: float) -> float:
    """The seconds between two saves that keep most time, a save included; `between` failures pass so many on average.

    >>> round(save_every(between=3600.0, restart=120.0, save=20.0))
    406
    """
    return save + sqrt(2 * (between + restart) * save + save * save)


def restarts_keep(between: float, restart: float, save: float) -> float:
    """The share of time that is kept if every failure costs what was done since the last save, and a restart.

    Failures come at random, also in saves and restarts, so a stretch of T seconds takes
    (between + restart) (exp(T / between) - 1) where a restart itself never fails, and a little longer where it does.

    >>> round(restarts_keep(between=3600.0, restart=120.0, save=20.0), 3)
    0.869
    """
    stretch = save_every(between, restart, save)
    if (restart + stretch) / between > 500:  # nearly no stretch ever ends
        return 0.0
    if not save:  # after every moment, so that a failure costs its restart alone
        return exp(-restart / between)
    takes = exp(restart / between) * between * (exp(stretch / between) - 1) if between < inf else stretch
    return (stretch - save) / takes
