"""What a run writes into the store that ranks meet in, it takes away again when all have left."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import attached, small_step
from tests.laws.samples import preset_recipes
from torch import nn

from gossamer.fabrics.liveness.store import default_store
from gossamer.recipe import Recipe

pytestmark = pytest.mark.gang

# What all recipes do with a store is one thing; some of these have lanes, tickets or groups of their own besides.
NAMES = {
    4: ("ad_psgd", "decoupled_diloco(2)", "backup", "hierarchical"),
    2: (
        *(
            "ad_psgd",
            "decoupled_diloco",
            "decoupled_diloco(2)",
            "allreduce",
            "qsgd",
            "gtopk",
            "demo",
            "overlap_local_sgd",
            "streaming_diloco",
        ),
        *("eager_diloco", "zero_one_adam", "accordion", "sgp", "osgp", "slowmo_sgp", "choco_sgd"),
    ),
}
TICKETS = ("ad_psgd", "decoupled_diloco", "decoupled_diloco(2)", "backup")
MANY, FEW = 80, 8  # steps: more rounds than tickets are kept of, and where none are drawn a round and these


def gentle(model: nn.Module) -> torch.optim.Optimizer:
    """Slow enough for the outer momentum of rounds of two steps: training must not diverge, for a warning is an error."""
    return torch.optim.SGD(model.parameters(), lr=0.001)


def kept(rank: int, size: int, recipes: list[tuple[str, str]]) -> dict[str, int]:
    """How many keys more there are after each recipe has been attached, trained with and detached."""
    counts = dict[str, int]()
    for name, text in [("first", "allreduce"), *recipes]:
        dist.barrier()
        before = default_store().num_keys()
        dist.barrier()
        recipe = Recipe.of(text)
        steps = MANY if name in TICKETS else min(recipe.schedule.shape.period + FEW, MANY)
        with attached(recipe, optimizer=gentle) as (model, optimizer, comm):
            while comm.step < steps:
                small_step(model, optimizer, comm, rank)
            comm.finish()
        dist.barrier()
        counts[name] = default_store().num_keys() - before
    del counts["first"]  # its host is told that all have left, until the next one begins
    return counts


@pytest.mark.parametrize("size", NAMES)
def test_nothing_is_left_in_the_store(gang_of: Callable[[int], Gang], size: int) -> None:
    presets = preset_recipes()
    recipes = [(name, repr(presets[name]) if name in presets else name) for name in NAMES[size]]
    for counts in gang_of(size).run(kept, recipes):
        assert {name: count for name, count in counts.items() if count} == {}
