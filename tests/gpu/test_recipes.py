"""Every preset, and a recipe with every registered part, trains on the pretended device: what it does wrong, and what it costs."""

import math

import pytest
from tests.gpu import limits
from tests.gpu.known import cases
from tests.gpu.loops import Plan, Seen, World
from tests.gpu.nursery import RankError
from tests.gpu.subjects import is_async, named, plan_of, short_presets

from gossamer.bench.catalogue import parts_of
from gossamer.core.parts import registry
from gossamer.recipe import Recipe


def seen_of(world: World, plan: Plan) -> list[Seen]:
    """What the ranks saw; that they could not train at all is for one test to say."""
    try:
        return world.run(plan)
    except RankError:
        pytest.skip("it did not train, as test_it_trains says")


def test_every_part_is_in_a_recipe() -> None:
    have = {part.name for text in named().values() for part in parts_of(Recipe.of(text))}
    refused = {"adacomp", "bernoulli", "strom"}  # on GPUs, for their wires are as long as dice or gradients say
    topologies = registry.of("topology").keys()  # arithmetic
    assert registry.of().keys() - {"bucket", "per_node", "route"} - refused - topologies <= have


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_it_trains", named()))
def test_it_trains(world: World, name: str) -> None:
    """No mixed devices, nothing refused by NCCL, no deadlock; and something travels in the steps that are counted."""
    for seen in world.run(plan_of(named()[name])):
        assert all(map(math.isfinite, seen.losses))
        assert seen.crossed > 0


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_there_are_no_races", named()))
def test_there_are_no_races(world: World, name: str) -> None:
    for seen in seen_of(world, plan_of(named()[name])):
        assert not seen.races
        assert not seen.inverted


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_memory_is_kept_until_streams_have_met", named()))
def test_memory_is_kept_until_streams_have_met(world: World, name: str) -> None:
    for seen in seen_of(world, plan_of(named()[name])):
        assert not seen.lifetimes


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_the_host_waits_once_a_step", named()))
def test_the_host_waits_once_a_step(world: World, name: str) -> None:
    """Or once a round; one that watches epochs once more at their end."""
    recipe = Recipe.of(named()[name])
    for seen in seen_of(world, plan_of(named()[name])):
        assert seen.syncs_a_step() <= limits.syncs(recipe), seen.syncs


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_no_lane_waits", named()))
def test_no_lane_waits(world: World, name: str) -> None:
    """But where somebody answers whoever is first: NCCL cannot, so that lane goes by way of the host."""
    for seen in seen_of(world, plan_of(named()[name])):
        assert is_async(named()[name]) or not seen.lane_syncs


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_what_is_kept", short_presets()))
def test_what_is_kept(world: World, name: str) -> None:
    assert name in limits.KEPT, f"say in tests/gpu/limits.py what {name} may keep"
    for seen in seen_of(world, plan_of(named()[name])):
        assert seen.kept <= limits.KEPT[name] + limits.CRUMBS


@pytest.mark.gang
@pytest.mark.parametrize("name", cases("test_what_is_needed_for_a_while", short_presets()))
def test_what_is_needed_for_a_while(world: World, name: str) -> None:
    """Beyond what is kept; of ranks at a pace of their own, beyond what may be: the rest may be gone when it is counted."""
    for seen in seen_of(world, plan_of(named()[name])):
        kept = limits.KEPT[name] if is_async(named()[name]) else seen.kept
        beyond = limits.PEAKS.get(name, limits.PEAK) + limits.ACTIVATIONS + limits.CHANCE
        assert seen.peak <= kept + beyond
