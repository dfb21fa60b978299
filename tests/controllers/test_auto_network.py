"""auto on links whose rate changes while it trains, in virtual time; the model is small, and all times are scaled with it."""

import pytest
import torch
from tests.controllers.test_auto import exchange, make, pulled, words

from gossamer.costs import Cluster, Hosts
from gossamer.costs.events import Begin, Events, LinkRate, SlowSteps
from gossamer.planning.model_cost import ModelCost, guessed_shares
from gossamer.planning.work import NoWork
from gossamer.simulate import ClusterCosts, Trained, costs_on, train

GBIT, MBIT50 = 125e6, 6.25e6  # bytes per second
SHAPES = {"matrix": (32, 32), "vector": (32,)}
MODEL = ModelCost(shapes=SHAPES, forward=2e-4, backward=4e-4, optimizer=0.0, shares=guessed_shares(SHAPES))
HOSTS = Hosts(count=4, up=GBIT, latency=1e-6)
CLUSTER = Cluster(hosts=(HOSTS,), payload=1.0, efficiency={"ring": 1.0}, byte_seconds=0.0, program_seconds=0.0)
FALLS, STEPS, SOON = 300, 1200, 250
DENSE = "allreduce(fp32())"
LAST_SECONDS = 0.55  # at 50 mbit: some 600 steps


def on(events: Events) -> ClusterCosts:
    return costs_on(CLUSTER, "auto", MODEL, NoWork(), events)


def chosen(run: Trained) -> list[tuple[int, str]]:
    """What came in force to stay, and from which step on."""
    found = list[tuple[int, str]]()
    for decision in run.ledger.decisions:
        said = decision.decision
        if decision.rank == 0 and said.startswith("auto: "):
            found.append((decision.step, said.split()[1]))
    return found


def test_a_rate_that_falls_and_rises_again_is_followed_both_times() -> None:
    """From 1 gbit to 50 mbit at step 300, and back: a right change within 250 steps of each."""
    ranks = make()
    events = Events(links=(LinkRate(0, MBIT50, LAST_SECONDS, Begin(step=FALLS)),))
    run = train(ranks, pulled, STEPS, on(events))
    moments = run.moments(STEPS)
    rises = next(i + 1 for i, at in enumerate(moments) if at > moments[FALLS - 2] + LAST_SECONDS)
    assert 700 < rises < STEPS - SOON
    assert [name for _, name in chosen(run)] == ["dense", "qsgd", "dense"]
    (first, _), (second, _), (third, _) = chosen(run)
    assert first <= 60
    assert FALLS < second <= FALLS + SOON
    assert rises < third <= rises + SOON
    assert exchange(ranks) == DENSE
    assert all(words(run, rank) == words(run) for rank in range(4))
    assert all(torch.equal(r.flat(), ranks[0].flat()) for r in ranks)


@pytest.mark.parametrize("shift", [0, pytest.param(25, marks=pytest.mark.slow)])
def test_a_rate_that_flickers_changes_the_choice_twice_at_most(shift: int) -> None:
    """Every 50 steps between 1 gbit and 50 mbit, in 1,000 steps."""
    slow = [LinkRate(0, MBIT50, 50 * 2e-3, Begin(step=turn + shift + 1)) for turn in range(0, 1000, 100)]
    run = train(make(), pulled, 1000, on(Events(links=tuple(slow))))
    names = [name for _, name in chosen(run)]
    assert sum(a != b for a, b in zip(["dense", *names], names)) <= 2
    assert sum("measures again" in word for word in words(run)) <= 4


def test_a_rank_that_sleeps_through_each_step_is_named_and_nothing_changes() -> None:
    """It sleeps for 200 times what a step computes, from the first step on: the network is fast."""
    ranks = make()
    run = train(ranks, pulled, 300, on(Events(slow=(SlowSteps(2, 200.0, 10_000),))))
    assert exchange(ranks) == DENSE
    assert chosen(run) == [(16, "dense")]
    assert "; rank 2 computes 120 ms a step, the others 600 us, which no recipe changes" in words(run)[-1]
