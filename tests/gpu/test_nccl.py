"""Every recipe under NCCL's rules, over staged gloo, from a checkpoint on the CPU, and where nobody has set a device."""

import math

import pytest
from tests.gpu import limits
from tests.gpu.known import cases
from tests.gpu.loops import World
from tests.gpu.subjects import (
    is_async,
    named,
    one_of_a_kind,
    one_of_each_codec,
    one_of_every_setting,
    plan_of,
    plans_under_nccl,
    short_presets,
    waits_for_few,
)
from tests.gpu.test_recipes import seen_of

from gossamer.recipe import Recipe

pytestmark = pytest.mark.gang

NODES = "nodes(scatter(qsgd()), 2)"  # whose ranks talk in groups
UNDER_NCCL = {str(plan): plan for text in (*short_presets().values(), NODES) for plan in plans_under_nccl(text)}
ALIKE = [*(named()[name] for name in one_of_each_codec()), NODES]  # to network and device, others are like one of these
FEW = {str(plan) for text in ALIKE for plan in plans_under_nccl(text)}


@pytest.mark.parametrize("name", cases("test_it_trains_under_nccls_rules", UNDER_NCCL, always=FEW))
def test_it_trains_under_nccls_rules(world: World, name: str) -> None:
    """With two and three ranks, communicators made lazily and at once, and whatever the user's group is called."""
    for seen in world.run(UNDER_NCCL[name]):
        assert seen.crossed > 0
        assert seen.groups, "it went another way"
        assert not seen.races
        assert not seen.lifetimes
        assert not seen.inverted


@pytest.mark.parametrize("name", cases("test_no_communicator_is_left", short_presets(), always=one_of_each_codec()))
def test_no_communicator_is_left(world: World, name: str) -> None:
    """After `detach` each is destroyed; or they pile up in the GPU's memory."""
    for seen in seen_of(world, plan_of(named()[name])):
        assert seen.groups
        assert all(seen.groups)


@pytest.mark.parametrize("name", cases("test_launches_do_not_grow", short_presets(), always=one_of_each_codec()))
def test_launches_do_not_grow(world: World, name: str) -> None:
    """Six more parameters cost their copies, and nothing for each of three ranks."""
    few, many = plans_under_nccl(named()[name])[:2]
    recipe = Recipe.of(named()[name])
    cut = getattr(recipe.schedule, "fragments", 1) is None
    blocks = min(recipe.schedule.shape.period, 2) if cut else 1 + bool(recipe.rules)
    more = limits.launches(name) * 2 * (many.depth - few.depth)
    for a, b in zip(seen_of(world, few), seen_of(world, many), strict=True):
        assert a.buckets == b.buckets == blocks  # vectors may travel apart, and so do fragments
        assert b.launches_a_step() - a.launches_a_step() <= more, b.launches - a.launches


RESUMED = [n for n, text in short_presets().items() if not (waits_for_few(text) or is_async(text))]


@pytest.mark.parametrize("name", cases("test_a_checkpoint_on_the_cpu_resumes", RESUMED))
def test_a_checkpoint_on_the_cpu_resumes(world: World, name: str) -> None:
    """As if nothing had been: the losses are those of a run that went on."""
    straight = seen_of(world, plan_of(named()[name]))
    if not straight[0].remembers:
        pytest.skip("its checkpoint holds nothing but numbers")
    for a, b in zip(straight, world.run(plan_of(named()[name], resumes=True)), strict=True):
        assert b.losses == a.losses[: len(b.losses)]


CONTROLLED = ("allreduce(fp32()) + adascale()", "allreduce(fp32()) + noise_batch(4, warmup=1)")  # no preset has these


@pytest.mark.parametrize("text", cases("test_what_a_controller_has_counted_resumes", CONTROLLED))
def test_what_a_controller_has_counted_resumes(world: World, text: str) -> None:
    straight, resumed = seen_of(world, plan_of(text)), world.run(plan_of(text, resumes=True))
    for a, b in zip(straight, resumed, strict=True):
        assert b.losses == a.losses[: len(b.losses)]


THERE = (
    "fabrics/torch/staged.py",
    "schedules/pair_server.py",
    "schedules/server.py",
)  # servers read what they are asked, on a thread of their own


STAGED = (*one_of_every_setting(), NODES)


@pytest.mark.parametrize("name", cases("test_it_trains_over_staged_gloo", STAGED, always=(*one_of_a_kind(), NODES)))
def test_it_trains_over_staged_gloo(world: World, name: str) -> None:
    """A CUDA model over a gloo group. A lane may wait for the copies to pinned memory, and for nothing else."""
    plan = plan_of(named()[name], backends="gloo", warm=1, steps=2)
    for seen in world.run(plan):
        assert all(map(math.isfinite, seen.losses))
        assert not seen.races
        assert not seen.lifetimes
        assert not [place for place in seen.lane_syncs if not any(there in place for there in THERE)]


WITHOUT_A_DEVICE = ("allreduce", "qsgd", "overlap_local_sgd", "osgp", "backup")


@pytest.mark.parametrize("name", cases("test_nobody_need_set_a_device", WITHOUT_A_DEVICE))
def test_nobody_need_set_a_device(world: World, name: str) -> None:
    """A loop that says `model.to("cuda:1")`, and no more: all that gossamer does is on that device, and in order."""
    for seen in world.run(plan_of(named()[name], sets_device=False, warm=1, steps=2)):
        assert not seen.races
        assert not seen.lifetimes
        assert not seen.strays


WITHOUT_TRITON = ("qsgd", "terngrad", "allreduce(ternary())")


@pytest.mark.parametrize("name", cases("test_no_lane_waits_where_there_is_no_triton", WITHOUT_TRITON))
def test_no_lane_waits_where_there_is_no_triton(world: World, name: str) -> None:
    for seen in world.run(plan_of(named()[name], triton=False)):
        assert not seen.races
        assert not seen.lane_syncs
