"""Describes a controller's change in one log line, since a recipe's text, which names every parameter, may be too long."""

from gossamer.core.text import listed
from gossamer.recipe import Recipe

FEW = 3  # parameters to list by name; more are given by their number


def describe(before: Recipe, now: Recipe, parameters: int) -> str:
    """The parts of the recipe that changed, with their new values.

    >>> mild = Recipe.of("allreduce(powersgd(rank=8)) + error_feedback()")
    >>> harsh = Recipe.of("allreduce(powersgd(rank=1)) + error_feedback()")
    >>> describe(mild, harsh, 78)
    'allreduce(powersgd(rank=1)) for all 78 parameters'
    >>> mixed = mild.route(mild.exchange, harsh.exchange, ["head.weight", "layer.weight"])
    >>> describe(mild, mixed, 78)
    'allreduce(powersgd(rank=1)) for head.weight and layer.weight, allreduce(powersgd(rank=8)) for the other 76'
    >>> describe(mixed, mild, 78)
    'allreduce(powersgd(rank=8)) for all 78 parameters'
    >>> describe(Recipe.of("allreduce"), Recipe.of("terngrad(last='qsgd')"), 78)
    "rule('last', scatter(qsgd())), scatter(ternary(), answer=qsgd(bits=3)) for all others"
    """
    changed = [now.memory] if now.memory != before.memory else []
    changed += [now.schedule] if now.schedule != before.schedule else []
    said = [repr(part) for part in changed]
    if (now.exchange, now.routes, now.rules) != (before.exchange, before.routes, before.rules):
        said.insert(0, _ways(now, parameters))
    return "; ".join(said)


def _ways(recipe: Recipe, parameters: int) -> str:
    by = dict[str, list[str]]()
    for name, exchange in recipe.routes.items():
        by.setdefault(repr(exchange), []).append(name)
    said = [f"{exchange} for {_names(names)}" for exchange, names in by.items()]
    if recipe.rules:
        return ", ".join([*map(repr, recipe.rules), *said, f"{recipe.exchange!r} for all others"])
    rest = parameters - len(recipe.routes)
    who = f"the other {rest}" if said else f"all {parameters} parameters"
    return ", ".join([*said, f"{recipe.exchange!r} for {who}"] if rest else said)


def _names(names: list[str]) -> str:
    return f"{len(names)} parameters" if len(names) > FEW else listed(names)
