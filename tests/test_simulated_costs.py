"""The simulator's clock on a cluster: links, processors, and a backward pass whose gradients come one after the other."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gossamer.core.errors import CostError
from gossamer.costs import Cluster, Hosts
from gossamer.costs.events import Begin, Events, LateMessages, LinkRate, SlowSteps
from gossamer.costs.laws import Lognormal
from gossamer.planning.model_cost import ModelCost, guessed_shares
from gossamer.planning.work import NoWork, Work
from gossamer.simulate import ClusterCosts, Replica, Trained, costs_on, replicas, train

SHAPES = {"0.weight": (200, 100), "1.weight": (50, 200)}
HOSTS = Hosts(count=4, up=1e6, latency=1e-3)
CLUSTER = Cluster(hosts=(HOSTS,), payload=1.0, efficiency={"ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
MODEL = ModelCost(shapes=SHAPES, forward=0.1, backward=0.3, optimizer=0.05, shares=guessed_shares(SHAPES))
TWO_BUCKETS = "allreduce + bucket(0.01)"


class Steady:
    """Every piece of a program takes 10 ms."""

    name = "steady"

    def of(self, program: Any, size: int, verbs: Any) -> list[Work]:
        return [Work(0.01, 0.0)] * (len(verbs) + 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 50, bias=False))


def pull(model: nn.Module, rank: int, step: int) -> float:
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def trained(recipe: str, costs: ClusterCosts | None, steps: int = 3) -> Trained:
    fleet = replicas(recipe, net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 4)
    return train(fleet, pull, steps, costs)


def flats(run: Trained) -> list[torch.Tensor]:
    return [Replica.flat(replica) for replica in run.replicas]


def test_gradients_arrive_by_the_blocks_that_are_in_force_also_after_a_controller_has_cut_them_anew() -> None:
    recipe = "terngrad(last='qsgd')"  # sends the last layer in a block of its own
    auto = f'auto(allow=("{recipe}",))'
    slow = replace(CLUSTER, hosts=(replace(HOSTS, up=1e5),))
    alone = trained(recipe, costs_on(slow, recipe, MODEL, NoWork()), 4).moments(4)
    run = trained(auto, costs_on(slow, auto, MODEL, NoWork()), 18)
    moments = run.moments(18)
    assert any(f"auto: {recipe} from step 13" in each.decision for each in run.ledger.decisions)
    assert len(moments) == 18
    assert moments[-1] - moments[-2] == pytest.approx(alone[-1] - alone[-2], rel=1e-3)


def test_auto_is_charged_for_what_it_has_put_in_force() -> None:
    """terngrad has more pieces than dense, which was charged to the end; and candidates took no time to be run."""
    recipe = "terngrad(last='qsgd')"
    auto = f'auto(allow=("{recipe}",))'
    slow = replace(CLUSTER, hosts=(replace(HOSTS, up=1e5),))
    alone = trained(recipe, costs_on(slow, recipe, MODEL, Steady()), 4).moments(4)
    costs = costs_on(slow, auto, MODEL, Steady())
    run = trained(auto, costs, 30)
    moments = run.moments(30)
    assert any(f"auto: {recipe} from step " in each.decision for each in run.ledger.decisions)
    assert moments[-1] - moments[-2] == pytest.approx(alone[-1] - alone[-2], rel=1e-3)
    assert not costs.links.in_force  # of another run
    ran = [span for span in run.spans if span.rank == 0 and span.kind == "computing" and span.end - span.begin < 0.09]
    assert len(ran) >= 2


def test_a_step_takes_computing_and_the_ring_that_nothing_hides() -> None:
    costs = costs_on(CLUSTER, "allreduce + bucket(100.0)", MODEL, NoWork())
    run = trained("allreduce + bucket(100.0)", costs, steps=1)
    ring = 6 * 1e-3 + 6 / 4 * 4 * MODEL.numel / 1e6
    assert run.seconds == pytest.approx(MODEL.computing + ring)


def test_buckets_cross_while_backward_goes_on() -> None:
    run = trained(TWO_BUCKETS, costs_on(CLUSTER, TWO_BUCKETS, MODEL, NoWork()), steps=1)
    one, two = (6e-3 + 6 / 4 * 4 * n / 1e6 for n in (10_000, 20_000))
    ready = 0.1 + 0.05 + 0.3 / 3  # of the last layer's gradient, a third of the model
    assert run.seconds == pytest.approx(max(0.45, ready + one) + two)
    assert run.seconds < 0.45 + one + two - 0.05


def test_work_is_charged_between_requests_and_cores_are_shared() -> None:
    recipe = "allreduce + bucket(100.0)"
    free = trained(recipe, costs_on(CLUSTER, recipe, MODEL, NoWork()), 1).seconds
    charged = trained(recipe, costs_on(CLUSTER, recipe, MODEL, Steady()), 1)
    assert charged.seconds == pytest.approx(free + 0.02)
    coding = [span for span in charged.spans if span.kind == "coding" and span.rank == 0]
    assert sum(span.end - span.begin for span in coding) == pytest.approx(0.02)
    two = replace(CLUSTER, hosts=(replace(HOSTS, count=2, ranks=2, cores=1.0),))
    shared = [s for s in trained(recipe, costs_on(two, recipe, MODEL, NoWork()), 1).spans if s.kind == "computing"]
    assert sum(span.end - span.begin for span in shared if span.rank == 3) == pytest.approx(2 * MODEL.computing)


def test_a_slow_host_is_waited_for() -> None:
    hosts = (replace(HOSTS, count=3), replace(HOSTS, count=1, speed=0.5))
    recipe = "allreduce + bucket(100.0)"
    even = trained(recipe, costs_on(CLUSTER, recipe, MODEL, NoWork()), 2)
    uneven = trained(recipe, costs_on(replace(CLUSTER, hosts=hosts), recipe, MODEL, NoWork()), 2)
    assert uneven.seconds == pytest.approx(even.seconds + 2 * MODEL.computing)
    waits = [s.end - s.begin for s in uneven.spans if s.kind == "waiting" and s.rank == 0]
    assert sum(waits) > 2 * MODEL.computing


def test_a_law_of_computing_is_drawn_for_each_rank_and_step() -> None:
    recipe, law = "allreduce + bucket(100.0)", Lognormal(0.5)
    even = trained(recipe, costs_on(CLUSTER, recipe, MODEL, NoWork()))
    moody = trained(recipe, costs_on(replace(CLUSTER, law=law), recipe, MODEL, NoWork()))
    later = sum(max(law.at(rank, step) for rank in range(4)) - 1 for step in (1, 2, 3))
    assert later > 0.3
    assert moody.seconds == pytest.approx(even.seconds + later * MODEL.computing)
    assert all(map(torch.equal, flats(moody), flats(even)))


def with_events(events: Events, recipe: str, steps: int = 3) -> Trained:
    return trained(recipe, costs_on(CLUSTER, recipe, MODEL, NoWork(), events), steps)


def test_slow_steps_of_one_rank_are_waited_for() -> None:
    recipe = "allreduce + bucket(100.0)"
    plain = with_events(Events(), recipe, 4).seconds
    by_step = with_events(Events(slow=(SlowSteps(2, 3.0, 2, Begin(step=2)),)), recipe, 4)
    assert by_step.seconds == pytest.approx(plain + 2 * 2 * MODEL.computing)
    by_clock = with_events(Events(slow=(SlowSteps(2, 3.0, 9, Begin(seconds=plain / 2 + 0.01)),)), recipe, 4)
    assert by_clock.seconds == pytest.approx(plain + 2 * MODEL.computing)


def test_events_do_not_begin_again_when_training_goes_on() -> None:
    """Of three slow steps two are in the first half, and one in the second; the link is slow at the first step only."""
    slow, link = SlowSteps(1, 4.0, 3, Begin(step=2)), LinkRate(2, HOSTS.up / 2, 0.5, Begin(step=1))
    costs = costs_on(CLUSTER, "allreduce", MODEL, NoWork(), Events(slow=(slow,), links=(link,)))
    fleet = replicas("allreduce", net, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 4)
    halves = [train(fleet, pull, 3, costs).seconds for _ in range(2)]
    assert sum(halves) == pytest.approx(trained("allreduce", costs, 6).seconds)


def test_a_slow_link_takes_longer_for_what_crosses_meanwhile() -> None:
    recipe = "allreduce + bucket(100.0)"
    plain = with_events(Events(), recipe, 1).seconds
    bits = 6 / 4 * 4 * MODEL.numel
    assert with_events(Events(links=(LinkRate(1, 1e5, 1e9),)), recipe, 1).seconds == pytest.approx(
        plain + bits / 1e5 - bits / 1e6
    )
    half = bits / 1e6 / 2
    midway = Events(links=(LinkRate(1, 1e5, half, Begin(seconds=MODEL.computing)),))
    assert with_events(midway, recipe, 1).seconds == pytest.approx(plain + half - half / 10)


def test_a_late_message_makes_its_collective_late() -> None:
    always = Events(late=(LateMessages(1.0, 0.2),))
    recipe = "allreduce + bucket(100.0)"
    assert with_events(always, recipe).seconds == pytest.approx(with_events(Events(), recipe).seconds + 3 * 0.2)
    assert with_events(always, "sgp").seconds > with_events(Events(), "sgp").seconds + 0.2


@pytest.mark.parametrize("recipe", [TWO_BUCKETS, "qsgd + bucket(0.01)", "local_sgd(2)", "sgp"])
def test_events_change_times_and_no_number(recipe: str) -> None:
    slow = (SlowSteps(1, 4.0, 2, Begin(step=2)),)
    events = Events(slow, (LinkRate(3, 2e5, 0.5, Begin(seconds=0.3)),), (LateMessages(0.2, 0.2),), seed=5)
    run, plain = with_events(events, recipe), with_events(Events(), recipe)
    assert all(map(torch.equal, flats(run), flats(plain)))
    assert run.ledger.sent == plain.ledger.sent
    assert run.seconds > plain.seconds
    costs = costs_on(CLUSTER, recipe, MODEL, NoWork(), events)
    once, again = trained(recipe, costs), trained(recipe, costs)
    assert once.spans == again.spans == run.spans


@pytest.mark.parametrize("recipe", [TWO_BUCKETS, "qsgd + bucket(0.01)", "local_sgd(2)", "sgp", "accordion_batch(2)"])
def test_costs_change_times_and_no_number(recipe: str) -> None:
    costs = costs_on(CLUSTER, recipe, MODEL, Steady())
    run, plain = trained(recipe, costs), trained(recipe, None)
    for a, b in zip(flats(run), flats(plain), strict=True):
        assert torch.equal(a, b)
    assert run.ledger.sent == plain.ledger.sent
    again = trained(recipe, costs)
    assert (again.seconds, again.spans) == (run.seconds, run.spans)
    assert run.seconds > 3 * MODEL.computing


def test_a_cluster_of_another_size_is_refused() -> None:
    costs = costs_on(replace(CLUSTER, hosts=(replace(HOSTS, count=3),)), "allreduce", MODEL, NoWork())
    with pytest.raises(CostError, match="the cluster has 3 ranks and 4 train; give as many"):
        trained("allreduce", costs)
