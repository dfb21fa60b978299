"""What keeps machines busy: each answer, planned again, reaches its share of the time, and a little less does not."""

from dataclasses import replace
from functools import cache

import pytest
from tests.planning.models import SMALL

from gossamer.core.errors import CostError
from gossamer.costs import Cluster, Hosts
from gossamer.planning.plan import TrainingPlan, plan
from gossamer.planning.targets import Target, reached
from gossamer.planning.work import NoWork

FOUR = Cluster(hosts=(Hosts(count=4, up=2e6, latency=1e-4),))
RECIPES = ["qsgd", "topk", "local_sgd(8)"]


def ask(target: Target, cluster: Cluster) -> dict[str, dict[float, float]]:
    def planned(there: Cluster) -> TrainingPlan:
        return plan(SMALL, there, RECIPES, work=NoWork(), curves=target == "rate")

    return {name: dict(row) for name, row in reached(target, cluster, planned).values.items()}


@cache
def on_four(target: Target) -> dict[str, dict[float, float]]:
    return ask(target, FOUR)


def busy(recipe: str, cluster: Cluster) -> float:
    seconds = plan(SMALL, cluster, [recipe], work=NoWork(), curves=False).recipes[0].seconds
    assert seconds is not None
    return seconds.utilisation


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_the_rate_is_the_lowest_that_reaches_it(share: float) -> None:
    found = on_four("rate")
    assert found["qsgd"][share] < found["ddp"][share]
    rate = found["qsgd"][share]
    assert busy("qsgd", FOUR.at_rate(0.96 * rate)) < share < busy("qsgd", FOUR.at_rate(1.04 * rate))


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_the_round_is_the_shortest_that_reaches_it(share: float) -> None:
    found = on_four("every")
    assert [*found] == ["local_sgd(8)"]
    steps = int(found["local_sgd(8)"][share])
    assert busy(f"local_sgd({steps})", FOUR) >= share
    assert steps == 1 or busy(f"local_sgd({max(int(0.9 * steps), 1)})", FOUR) < share


def test_the_ranks_are_the_most_of_those_tried() -> None:
    cluster = replace(FOUR, hosts=(replace(FOUR.hosts[0], up=1e8, ranks=2),))
    found = ask("ranks", cluster)["topk"]
    share = next(share for share, ranks in found.items() if 4 < ranks < 2048)
    hosts = int(found[share]) // 2
    of = [replace(cluster, hosts=(replace(cluster.hosts[0], count=count),)) for count in (hosts, 2 * hosts)]
    assert busy("topk", of[0]) >= share > busy("topk", of[1])


def test_what_has_no_answer_says_why() -> None:
    def planned(there: Cluster) -> TrainingPlan:
        return plan(SMALL, there, ["qsgd(bits=99)", "qsgd"], work=NoWork(), curves=False)

    refused = reached("every", FOUR, planned).refused
    assert "bits" in refused["qsgd(bits=99)"]
    assert refused["qsgd"] == "it has no rounds whose length is free"
    unlike = Cluster(hosts=(Hosts(count=2, up=1e6), Hosts(count=2, up=1e6, speed=0.5)))
    with pytest.raises(CostError, match="unlike groups of hosts"):
        reached("ranks", unlike, planned)
