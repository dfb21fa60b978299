"""Virtual seconds of the claims of time, against what they must be."""

import math

import pytest

from gossamer import backups
from gossamer.bench.claims.clocks import (
    BAND,
    LAWS,
    DrawnAgain,
    NowAndThen,
    paced,
    share_at_most,
    throughput,
    with_a_slow_link,
)
from gossamer.bench.claims.evidence import ClaimRun, Evidence
from gossamer.bench.claims.failing import AWAY, going_on, moments, starting_again
from gossamer.bench.claims.planned import busy_rates, gossip_on_gpus
from gossamer.planning.losses import restarts_keep


def test_an_average_at_every_step_takes_what_was_asked_for() -> None:
    found = paced(0, "allreduce", "constant", ranks=4, phi=0.5, steps=4)["step"]
    assert found == pytest.approx([1 + 0.5 * stretch for stretch in BAND])


def test_a_round_that_overlaps_shows_nothing_and_gossip_half_of_its_message() -> None:
    assert paced(0, "overlap_local_sgd(2)", "constant", 4, 0.5, 4)["step"] == pytest.approx([1, 1, 1])
    message = 4 / (2 * 3) * 0.5  # one model, where a ring sends 2 (N - 1) / N of it
    assert paced(0, "sgp", "constant", 4, 0.5, 4)["step"] == pytest.approx([1 + message * b for b in BAND], rel=1e-3)


def test_one_slow_link_holds_up_a_ring() -> None:
    assert with_a_slow_link(0, "allreduce", "constant", 4, 0.5, 2)["step"][1] == pytest.approx(1 + 5.0)


@pytest.mark.parametrize("name", ["exponential", "lognormal", "now and then"])
def test_laws_are_of_mean_one_and_the_same_for_all_recipes(name: str) -> None:
    """The mean of 20,000 draws is within 5 of its standard errors, at most .4 for the widest law: wrong once in a million."""
    law = DrawnAgain(LAWS[name], 3)
    drawn = [law.at(rank, step) for rank in range(20) for step in range(1000)]
    spread = math.sqrt(sum((x - 1) ** 2 for x in drawn) / len(drawn))
    assert abs(sum(drawn) / len(drawn) - 1) < 5 * spread / math.sqrt(len(drawn))
    assert drawn[:1000] == [law.at(0, step) for step in range(1000)]
    assert drawn[:1000] != [DrawnAgain(LAWS[name], 4).at(0, step) for step in range(1000)]


def test_a_rank_is_slow_now_and_then() -> None:
    law = NowAndThen(0.02, 5.0)
    assert {round(law.at(rank, step) * 1.08, 9) for rank in range(10) for step in range(100)} == {1.0, 5.0}


def test_a_share_is_judged_at_both_ends_of_the_band() -> None:
    def run(case: str, seed: int, steps: list[float]) -> ClaimRun:
        return ClaimRun("s", case, "judged", 0, seed, {}, {"step": steps}, 0.0, 0.0)

    seeds = (30, 31)
    runs = [run("slow", s, [1.8, 2.0, 2.5]) for s in seeds] + [run("fast", s, [1.0, 1.0, 1.5]) for s in seeds]
    evidence = Evidence(runs)
    assert share_at_most(evidence, "s", "fast", "slow", 0.9).verdict == "holds"  # 1.5 of 1.8 at the worst end
    assert share_at_most(evidence, "s", "fast", "slow", 0.6).verdict == "partly"  # .5 as planned
    assert share_at_most(evidence, "s", "fast", "slow", 0.4).verdict == "not"


def test_failures_come_as_often_as_asked() -> None:
    """4,000 of them are expected, with a standard deviation of 63: 5 of those are exceeded once in a million."""
    assert abs(len(moments(0, 8, between=10.0, until=40_000.0)) - 4000) < 5 * 64


def test_who_goes_on_loses_the_time_of_one_rank_and_who_starts_again_that_of_all() -> None:
    """With seed 3 ranks 0 and 2 fail, after 86 and 94 of 120 steps, and lose a round each."""
    going = going_on(3, "decoupled_diloco(8)", ranks=4, between=100.0, phi=0.2, steps=120)
    again = starting_again(3, "allreduce", ranks=4, between=100.0, steps=120)
    assert max(going["still"]) <= 1.0
    assert again["restarts"][0] >= 1
    assert going["goodput"] == pytest.approx([(120 + 86 + 120 + 94 - 2 * 8) / (4 * 120)] * 3, abs=0.01)
    assert again["goodput"][0] < min(going["goodput"])
    assert again["goodput"][0] < 120 / (120 + AWAY)
    assert restarts_keep(198.0, AWAY, 5.0) == pytest.approx(0.58, abs=0.005)


def test_without_failures_all_time_becomes_steps() -> None:
    assert going_on(0, "decoupled_diloco(8)", 4, 1e9, 0.2, 24)["goodput"] == pytest.approx([1, 1, 1])


def test_spare_ranks_are_counted_as_order_statistics_do_where_nobody_is_late_twice() -> None:
    """With none to spare a step takes the slowest of all: the mean of 60 such steps of 20 ranks is within 5 standard errors."""
    found = throughput(0, 0.2, ranks=20, steps=60, tried=(0, 4))["gradients"]
    assert found[0] == pytest.approx(20 / backups.expected(20, 0, 0.8, 0.2), rel=5 * 0.2 * 1.28 / 1.5 / math.sqrt(60))
    assert found[1] > 0


def test_published_set_ups_are_planned() -> None:
    dense, gossip = (gossip_on_gpus(30, name)["step"] for name in ("ddp", "osgp"))
    assert dense == sorted(dense)
    assert all(a > b >= 0.271 for a, b in zip(dense, gossip, strict=True))


def test_rates_grow_with_how_busy_machines_are_to_be_and_dense_needs_most() -> None:
    rates = {m: busy_rates(30, "1B", m)["rate"] for m in ("data-parallel", "DiLoCo", "4 bits")}
    assert all(row == sorted(row) for row in rates.values())
    assert rates["data-parallel"][3] > 10 * rates["DiLoCo"][0] > rates["4 bits"][0]
    whole = 16.0  # Gbit of a billion 16-bit numbers: half of the time is a second of computing and a round of 100 steps
    assert rates["DiLoCo"][0] == pytest.approx(whole / (100 * 0.1), rel=0.03)
