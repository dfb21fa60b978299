"""The law of controllers: all ranks decide alike, and only what could be foreseen when the recipe was made."""

import pytest
from tests.laws.samples import controlled, controllers
from tests.runtime.gym import bit_equal, make, parameters, pull, train

from gossamer.controllers import Fixed
from gossamer.core.contracts import Controller
from gossamer.recipe import Recipe

STEPS = 12
every_controller = pytest.mark.parametrize("controller", controllers(), ids=repr)
every_controlled = pytest.mark.parametrize("recipe", [r for c in controllers() for r in controlled(c)], ids=repr)


@every_controller
def test_something_can_be_controlled_by_it(controller: Controller) -> None:
    assert list(controlled(controller))


@every_controlled
@pytest.mark.parametrize("size", [1, 3])
def test_all_ranks_decide_alike_and_within_reach_and_remember_tensors(recipe: Recipe, size: int) -> None:
    reach = [recipe, *recipe.controller.reach(_uncontrolled(recipe))]
    exchanges, schedules = {r.exchange for r in reach}, {r.schedule for r in reach}
    ranks = make(recipe, size)
    for _ in range(STEPS):
        equal = ranks[0].worker.recipe.schedule.is_synced(ranks[0].worker.step)
        train(ranks, pull, 1)
        now = {repr(r.worker.recipe) for r in ranks}
        assert len(now) == 1
        in_force = ranks[0].worker.recipe
        assert {in_force.exchange, *in_force.routes.values()} <= exchanges
        assert in_force.schedule in schedules
        assert bit_equal(parameters(ranks)) or not equal
    assert {type(t).__name__ for r in ranks for t in r.worker.controller.state.values()} <= {"Tensor"}


def _uncontrolled(recipe: Recipe) -> Recipe:
    from dataclasses import replace

    return replace(recipe, controller=Fixed())
