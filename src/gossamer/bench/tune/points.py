"""Points: which settings are tried, in which order.

The first trial of every recipe is the recipe as it was given, at the workload's own learning rate, so a search never ends
with worse than that. All others are points of one scrambled Sobol sequence: of any number of trials, these lie more evenly
than random ones, in the learning rate alone as in all knobs together. All recipes read the same sequence, the learning
rate in its first column, so each of them, dense too, is tried at the same rates.

Why not halve, or follow the best: who looks at early results gives up methods that are slow at first and good at last
(error feedback, slow momentum), and spends on each recipe what it seems to deserve. Here all have as many trials, each of
full length, and no trial depends on another: they may be run in any order, interrupted, resumed, and added to.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch

from gossamer.bench.tune.knobs import LR, Settings, turned
from gossamer.bench.tune.space import Space, TuningError
from gossamer.core.errors import RecipeError
from gossamer.core.text import shown
from gossamer.recipe import Recipe

COLUMNS = 64  # the same for all recipes, or their first columns would differ
PATIENCE = 4096  # points in a row that make no recipe


class Setting(NamedTuple):
    """What one trial tries: a recipe, and the multiple of the workload's learning rate."""

    recipe: Recipe
    lr: float
    values: Settings


def settings(space: Space, count: int, seed: int) -> list[Setting]:
    """The first `count` settings to try: the same for the same seed, and the beginning of those of a larger count."""
    first = Setting(space.recipe, 1.0, {})
    found = [first, *islice(_drawn(space, seed), count - 1)]
    return found[:count]


def _drawn(space: Space, seed: int) -> Iterator[Setting]:
    if len(space.knobs) > COLUMNS:
        raise TuningError(f"{shown(space.recipe)} has {len(space.knobs)} knobs, and {COLUMNS} are the most")
    sobol = torch.quasirandom.SobolEngine(COLUMNS, scramble=True, seed=seed)
    refused = 0
    while refused < PATIENCE:
        for place in sobol.draw(16, dtype=torch.float64).tolist():
            try:
                setting = _setting(space, place)
            except RecipeError:  # some values do not go together: the next point
                refused += 1
                continue
            refused = 0
            yield setting
    raise TuningError(f"{space.recipe}: hardly any values of its knobs go together")


def _setting(space: Space, place: list[float]) -> Setting:
    recipe, values = space.recipe, dict[str, object]()
    for knob, at in zip(space.knobs, place):
        assert knob.values is not None
        values[knob.name] = knob.values.at(at)
        if not knob.is_lr:
            recipe = turned(recipe, knob, values[knob.name])
    return Setting(recipe, float(str(values.get(LR, 1.0))), values)
