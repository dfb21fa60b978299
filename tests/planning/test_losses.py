"""Money and failures: against arithmetic by hand, and a run of failures drawn one by one."""

import random
from dataclasses import replace
from math import exp

import pytest
from tests.planning.models import SMALL

from gossamer.costs import Cluster, Hosts, from_flags
from gossamer.costs.quantities import Price
from gossamer.planning.losses import money_of, restarts_keep, save_every, time_kept
from gossamer.planning.plan import plan
from gossamer.planning.replay import StepSeconds
from gossamer.planning.work import NoWork

STEP = StepSeconds(3.6, 1.0, 2.0, 0.0, 0.6, 0.0, 1e9, 2e9)


def priced(**more: Price) -> Cluster:
    return Cluster(hosts=(Hosts(count=4, price=Price(2.0, "USD"), **more),))  # pyright: ignore[reportArgumentType]


def test_a_step_costs_its_hours_and_what_is_sent() -> None:
    assert money_of(STEP, Cluster(hosts=(Hosts(count=4),))) is None
    hours = money_of(STEP, priced())
    assert hours is not None
    assert (hours.amount, hours.currency) == (pytest.approx(4 * 2.0 * 3.6 / 3600), "USD")
    both = money_of(STEP, priced(egress=Price(0.05, "USD")))
    assert both is not None
    assert both.amount == pytest.approx(hours.amount + 4 * 0.05 * 2)
    half = money_of(STEP, priced(), kept=0.5)
    assert half is not None
    assert half.amount == pytest.approx(2 * hours.amount)


@pytest.mark.parametrize(
    ("between", "restart", "save"), [(3600.0, 120.0, 20.0), (600.0, 60.0, 10.0), (90.0, 30.0, 5.0)]
)
def test_the_time_that_restarts_keep_is_that_of_failures_drawn_one_by_one(
    between: float, restart: float, save: float
) -> None:
    """20,000 stretches; the mean's standard error is under 1 %, and five of them are allowed."""
    rng, clock, done = random.Random(0), 0.0, 0
    stretch = save_every(between, restart, save)
    while done < 20_000:
        survives = rng.expovariate(1 / between)
        if survives >= stretch:
            clock, done = clock + stretch, done + 1
            continue
        clock += survives
        while (again := rng.expovariate(1 / between)) < restart:  # it fails while it restarts
            clock += again
        clock += restart
    assert restarts_keep(between, restart, save) == pytest.approx(done * (stretch - save) / clock, rel=0.05)


def test_the_interval_between_saves_is_near_the_best() -> None:
    best = restarts_keep(3600.0, 120.0, 20.0)

    def keeps(stretch: float) -> float:
        return (stretch - 20.0) / (exp(120 / 3600) * 3600 * (exp(stretch / 3600) - 1))

    assert best >= max(keeps(s) for s in range(40, 2000, 10)) - 1e-3


def test_failures_that_never_end_keep_nothing() -> None:
    assert restarts_keep(1.0, 3600.0, 600.0) == 0.0
    assert restarts_keep(1.0, 3600.0, 1e-3) == 0.0


def test_saves_that_take_no_time_leave_restarts() -> None:
    free = restarts_keep(3600.0, 120.0, 0.0)
    assert free == pytest.approx(exp(-120 / 3600))
    assert free == pytest.approx(restarts_keep(3600.0, 120.0, 1e-6), rel=1e-3)


def test_who_goes_on_without_a_lost_rank_keeps_more() -> None:
    hosts = replace(from_flags(nodes=4, rate=1e6).hosts[0], mtbf=3600.0)
    here = replace(from_flags(nodes=4, rate=1e6), hosts=(hosts,))
    stops = time_kept("backup", here)
    assert time_kept("backup", from_flags(nodes=4, rate=1e6)) is None
    assert stops == time_kept(None, here) == pytest.approx(restarts_keep(900.0, 120.0, 20.0))
    for recipe in ("qsgd", "local_sgd(8)", "streaming_diloco(8)", "sgp", "decoupled_diloco(8)"):
        assert time_kept(recipe, here) == pytest.approx(1 - 120 / 3720)
    row = plan(SMALL, here, ["backup"], work=NoWork(), curves=False).recipes[0]
    assert row.kept == stops


def test_who_trains_on_one_host_alone_stops_with_it() -> None:
    """Nobody is left to go on; rounds on eight GPUs of one host were said to lose nothing but the time of its restart."""
    flags = from_flags(nodes=1, gpus=8)
    here = replace(flags, hosts=(replace(flags.hosts[0], mtbf=3600.0),))
    assert time_kept("local_sgd(8)", here) == time_kept(None, here) == pytest.approx(restarts_keep(3600.0, 120.0, 20.0))


def test_a_run_that_failures_leave_no_time_has_no_price() -> None:
    assert money_of(STEP, priced(), kept=0.0) is None
