"""Max-min fairness: the rates of flows that are under way at once and share links."""

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import NamedTuple

FULL = 1e-9  # of a link's capacity: what is left of a link that is full


class Flow(NamedTuple):
    """One transfer. `limit` is its rate when it is alone; on each of its `links` it needs so much for each unit of its rate."""

    limit: float
    links: Mapping[Hashable, float]


def fair_rates(flows: Sequence[Flow], capacities: Mapping[Hashable, float]) -> list[float]:
    """Rates by progressive filling: all rise together, and a flow stops at its own limit or where one of its links is full.

    No flow can have more without taking from one that has no more than it. Links without a capacity are never full.

    >>> card = {"card": 1.0}
    >>> fair_rates([Flow(0.9, card), Flow(0.2, card)], {"card": 1.0})
    [0.8, 0.2]

    Bertsekas and Gallager, Data Networks, 1992, section 6.5.
    """
    rates, rising, left = [0.0] * len(flows), set(range(len(flows))), dict(capacities)
    while rising:
        wanted = dict[Hashable, float]()
        for i in rising:
            for link, need in flows[i].links.items():
                wanted[link] = wanted.get(link, 0.0) + need
        spare = (left[link] / need for link, need in wanted.items() if link in left and need > 0)
        step = min([*spare, *(flows[i].limit - rates[i] for i in rising)])
        if step == inf:
            return [inf if i in rising else rate for i, rate in enumerate(rates)]
        for i in rising:
            rates[i] += step
        for link in wanted.keys() & left.keys():
            left[link] -= step * wanted[link]
        full = {link for link in wanted.keys() & left.keys() if left[link] <= FULL * capacities[link]}
        at_limit = {i for i in rising if rates[i] >= (1 - FULL) * flows[i].limit}
        stuck = {i for i in rising if any(need > 0 and link in full for link, need in flows[i].links.items())}
        rising -= at_limit | stuck
    return rates
