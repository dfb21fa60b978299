"""Knobs: the arguments of a recipe's parts, where they are in it, and what is worth trying of each.

The learning rate is a knob of every recipe. It is counted in multiples of the workload's own, which was found for dense
gradients: a schedule that has a `rate` takes it there, so that the recipe says all; else the optimizer's is changed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, get_type_hints

from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import Part
from gossamer.core.ranges import LogRange, Values, ranges_of
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.schedules import EveryStep

# From a recipe down to an argument: ("exchange", "codec", "ratio"), ("rules", 0, "exchange", ...).
Path = tuple[str | int, ...]
Settings = Mapping[str, Any]  # values by the names of knobs
LR = "lr"
RATES = LogRange(0.125, 4.0)
FREE = 1.02  # times the bytes: a range within which they differ less costs none


@dataclass(frozen=True)
class Knob:
    """One argument of a recipe, or the learning rate (which is at no place in it)."""

    name: str
    path: Path
    values: Values | None  # None where nothing says what is worth trying
    hint: Any = float

    @property
    def field(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def is_lr(self) -> bool:
        return not self.path


def knobs(recipe: Recipe) -> list[Knob]:
    """The learning rate, and all arguments that are no parts themselves, from the outside in.

    Two parts that have one name are told apart by where they are.

    >>> [k.name for k in knobs(Recipe.of("gather(topk()) + error_feedback()")) if k.values]
    ['lr', 'topk.ratio', 'topk.scope', 'error_feedback.decay']
    """
    same = {("controller", name) for name in _followers(recipe)}
    parts = [(part, path) for part, path in nested(recipe) if not isinstance(part, Recipe)]
    found = [(part, path) for part, path in parts if path[:2] not in same]
    names = [part.name for part, _ in found]
    out = [Knob(LR, (), RATES)]
    for part, path in found:
        title = part.name if names.count(part.name) == 1 else ".".join(map(str, path))
        for name, hint in _arguments(type(part)).items():
            if not isinstance(getattr(part, name), Part):
                out.append(Knob(f"{title}.{name}", (*path, name), ranges_of(type(part)).get(name), hint))
    return out


def nested(value: Any, path: Path = ()) -> Iterator[tuple[Any, Path]]:
    """Recipes and parts within a value, such as the codec of an exchange, and where they are."""
    if isinstance(value, tuple):
        for i, one in enumerate(value):
            yield from nested(one, (*path, i))
    elif isinstance(value, Recipe | Part):
        yield value, path
        for f in fields(value):  # pyright: ignore[reportArgumentType]
            yield from nested(getattr(value, f.name), (*path, f.name))


@cache
def _arguments(part: type[Part]) -> dict[str, Any]:
    hints = get_type_hints(part)
    return {f.name: hints[f.name] for f in fields(part)}  # pyright: ignore[reportArgumentType]


def turned(recipe: Recipe, knob: Knob, value: Any) -> Recipe:
    """The recipe with another value of a knob. A RecipeError says why there is none.

    >>> recipe = Recipe.of("powersgd")
    >>> turned(recipe, next(k for k in knobs(recipe) if k.field == "rank"), 8)
    allreduce(powersgd(rank=8)) + error_feedback()
    """
    if knob.path[0] != "exchange":
        return _put(recipe, knob.path, value)
    exchange = _put(recipe.exchange, knob.path[1:], value)
    levels: dict[str, Any] = dict.fromkeys(_followers(recipe), exchange)
    controller = replace(recipe.controller, **levels) if levels else recipe.controller  # pyright: ignore
    return replace(recipe, exchange=exchange, controller=controller)


def _followers(recipe: Recipe) -> list[str]:
    """Which of a controller's levels is the recipe's exchange, and has to stay it."""
    controller = recipe.controller
    return [f.name for f in fields(controller) if getattr(controller, f.name) == recipe.exchange]  # pyright: ignore


def _put(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    step, *rest = path
    if isinstance(step, int):
        return (*value[:step], _put(value[step], tuple(rest), new), *value[step + 1 :])
    return replace(value, **{step: _put(getattr(value, step), tuple(rest), new)})


def at_rate(recipe: Recipe, lr: float) -> tuple[Recipe, float]:
    """A recipe that multiplies the learning rate as far as its schedule can, and what is left to do.

    >>> at_rate(Recipe.of("qsgd"), 0.5), at_rate(Recipe.of("local_sgd(8)"), 0.5)[1]
    ((scatter(qsgd(bucket=128)) + every_step(rate=0.5), 1.0), 0.5)
    """
    schedule = recipe.schedule
    if lr == 1 or not isinstance(schedule, EveryStep):
        return recipe, lr
    try:
        return replace(recipe, schedule=replace(schedule, rate=schedule.rate * lr)), 1.0
    except RecipeError:
        return recipe, lr


def costs_bytes(recipe: Recipe, knob: Knob, parameters: Mapping[str, Any], size: int) -> bool:
    """Whether more is sent at one end of a knob's range than at another: then more quality is what one pays for."""
    if knob.is_lr or knob.values is None:
        return False
    if knob.path[0] == "controller":  # how often it will send which level, nobody knows before
        return True
    sent = list[float]()
    for value in knob.values.ends:
        try:
            sent.append(bytes_per_step(turned(recipe, knob, value), parameters, size))
        except (RecipeError, AttachError):  # not in this recipe, or not among so few ranks
            continue
    return bool(sent) and max(sent) > FREE * min(sent)
