"""Schedules whose ranks do not all wait for the slowest: simulated, and in agreement with what is replayed."""

from dataclasses import replace

import pytest
from tests.planning.models import SMALL

from gossamer.costs import from_flags
from gossamer.costs.laws import ShiftedExponential, SlowRank
from gossamer.planning.model_shapes import from_shapes
from gossamer.planning.own_pace import RANK_STEPS, simulated_ranks
from gossamer.planning.plan import plan, prepare
from gossamer.planning.work import NoWork
from gossamer.recipe import Recipe

EIGHT = from_flags(nodes=8, rate=1e6, latency=1e-4)


@pytest.mark.parametrize(
    "recipe", ["backup", "local_sgd(8)", "sgp", "osgp(every=4)", "allreduce + delayed()", "overlap_local_sgd(8)"]
)
def test_a_simulation_of_equal_ranks_takes_as_long_as_the_replay(recipe: str) -> None:
    replayed = prepare(recipe, SMALL, EIGHT, NoWork())
    simulated = replace(replayed, simulated=8)
    assert simulated.seconds(EIGHT).step == pytest.approx(replayed.seconds(EIGHT).step, rel=0.08)


def test_one_slow_rank_slows_only_those_that_wait_for_it() -> None:
    quick = replace(EIGHT, hosts=(replace(EIGHT.hosts[0], up=1e9),))
    slow = replace(quick, law=SlowRank(3.0, rank=2))
    free, waits = (
        ["backup", "decoupled_diloco(8)", "allreduce + by_speed(local_sgd(16))"],
        ["allreduce", "local_sgd(16)"],
    )
    found = plan(SMALL, slow, [*free, *waits], work=NoWork(), curves=False)
    steps = {row.name: row.seconds.step / SMALL.computing for row in found.recipes if row.seconds is not None}
    assert all(steps[name] < 1.35 for name in free), steps
    assert all(steps[name] == pytest.approx(3, rel=0.05) for name in waits), steps
    assert not any(row.rounds for row in found.recipes if row.simulated)
    assert {row.name: row.simulated for row in found.recipes} == dict.fromkeys(free, 8) | dict.fromkeys(waits, 0)
    assert found.dense.seconds is not None
    assert found.dense.seconds.waiting == pytest.approx(2 * SMALL.computing)
    assert found.baselines[-1].seconds is not None  # a rank alone waits for nobody
    assert found.baselines[-1].seconds.step == pytest.approx(SMALL.computing)


def test_random_computing_is_waited_for_less_often_in_rounds() -> None:
    law = replace(EIGHT, law=ShiftedExponential(0.3))
    found = plan(SMALL, law, ["allreduce", "local_sgd(8)"], work=NoWork(), curves=False)
    waiting = {row.name: row.seconds.waiting for row in found.recipes if row.seconds is not None}
    assert waiting["allreduce"] == pytest.approx(SMALL.computing * (ShiftedExponential(0.3).slowest(8, 1) - 1))
    assert 0 < waiting["local_sgd(8)"] < waiting["allreduce"] / 2
    assert all(row.seconds is not None and row.low < row.seconds.step < row.high for row in found.recipes)


def test_long_rounds_are_simulated_on_fewer_ranks() -> None:
    assert simulated_ranks(Recipe.of("ad_psgd"), 10_000) == 64
    few = simulated_ranks(Recipe.of("decoupled_diloco(100)"), 10_000)
    assert 4 <= few == RANK_STEPS // 500 < 64
    assert simulated_ranks(Recipe.of("decoupled_diloco(8)"), 3) == 3
    assert simulated_ranks(Recipe.of("sgp + per_node(6)"), 72) == 60  # whole nodes


def test_as_many_tensors_are_simulated_as_the_model_has_fragments() -> None:
    model = from_shapes({f"{i}.w": (32, 32) for i in range(16)}, 0.1, name="deep", memory_rate=10e9)
    prepared = prepare("allreduce + quorum_rounds(48, fragments=12)", model, EIGHT, NoWork())
    assert prepared.simulated == 8
    assert prepared.seconds(EIGHT).step > model.computing


def test_paces_are_those_of_whole_rounds() -> None:
    """An average takes as long as a whole round's computing: one more in the window would be seen."""
    slow = replace(EIGHT, hosts=(replace(EIGHT.hosts[0], up=1e5),))
    replayed = prepare("local_sgd(8)", SMALL, slow, NoWork())
    simulated = replace(replayed, simulated=8)
    assert simulated.seconds(slow).step == pytest.approx(replayed.seconds(slow).step, rel=0.02)


def test_gossip_that_overlaps_settles_at_the_pace_of_a_rank_that_is_always_slow() -> None:
    quick = replace(EIGHT, hosts=(replace(EIGHT.hosts[0], up=1e9),), law=SlowRank(3.0, rank=2))
    seconds = prepare("osgp(every=4)", SMALL, quick, NoWork()).seconds(quick)
    assert seconds.step == pytest.approx(3 * SMALL.computing, rel=0.03)


def test_a_rank_whose_first_step_takes_longer_than_all_steps_of_the_others_has_a_pace() -> None:
    quick = replace(EIGHT, hosts=(replace(EIGHT.hosts[0], up=1e9),), law=SlowRank(100.0, rank=2))
    seconds = prepare("backup", SMALL, quick, NoWork()).seconds(quick)
    assert SMALL.computing < seconds.step < 1.35 * SMALL.computing


def test_a_slow_rank_is_simulated_also_among_more_ranks_than_are() -> None:
    many = replace(from_flags(nodes=128, rate=1e9, latency=1e-6), law=SlowRank(3.0, rank=100))
    prepared = prepare("sgp", SMALL, many, NoWork())
    assert prepared.simulated == 64
    assert prepared.seconds(many).step == pytest.approx(3 * SMALL.computing, rel=0.05)


def test_shards_are_simulated_as_the_ranks_that_meet() -> None:
    """Of four hosts with two shards each, four ranks meet: a slower message is waited for as often as among four."""
    here = from_flags(nodes=4, gpus=2, rate=1e9, latency=1e-2)
    alone = from_flags(nodes=4, gpus=1, rate=1e9, latency=1e-2)
    cut, whole = (
        prepare("allreduce + quorum_rounds(4, quorum=4, overlap=0)", SMALL, cluster, NoWork(), shards)
        for cluster, shards in ((here, 2), (alone, 1))
    )
    assert cut.simulated == whole.simulated == 4
    assert cut.seconds(here).step == pytest.approx(whole.seconds(alone).step, rel=0.02)


def test_a_quorum_of_more_ranks_than_are_simulated_is_a_row_that_says_so() -> None:
    """And the other recipes are planned."""
    many = from_flags(nodes=128, rate=1e6)
    found = plan(SMALL, many, ["allreduce + quorum_rounds(8, quorum=100)", "qsgd"], work=NoWork(), curves=False)
    assert [row.error for row in found.possible] == [""]
    assert "it is simulated, on 64 ranks at most, and needs more of them: " in found.recipes[1].error


def test_a_mean_step_lies_between_its_bounds_where_few_rounds_are_slow() -> None:
    """In nine of ten rounds nobody is slow, and the mean has those that remain."""
    seldom = replace(EIGHT, law=SlowRank(5.0, share=0.02))
    found = plan(SMALL, seldom, ["allreduce"], work=NoWork(), curves=False)
    rows = [*found.baselines, *found.recipes]
    assert all(row.seconds is not None and row.low <= row.seconds.step <= row.high for row in rows)
