"""Checks which parts can be combined. Invalid combinations are refused, with the reason and the fix.

No part is known by name here: each declares its traits and its constraints (see `core.constraints`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gossamer import codecs
from gossamer.controllers import Fixed
from gossamer.core.constraints import Constrained, Constraint, agree, those
from gossamer.core.contracts import Codec, Controller, Exchange, LinearCodec, Memory, Update
from gossamer.core.errors import RecipeError
from gossamer.core.schedule import Schedule

Way = Mapping[str, Constrained]
"""The parts that a parameter's gradient passes through, by role."""


@dataclass(frozen=True)
class ConstrainedRules:
    """The rules or routes of a recipe, as one participant in its constraints."""

    word: str
    constraints: tuple[Constraint, ...] = ()

    @property
    def traits(self) -> frozenset[str]:
        return those(singles_out=True)

    def __str__(self) -> str:
        return self.word


def check(recipe: Any) -> list[Any]:
    """Raise RecipeError for an invalid recipe, or one whose controller may apply such; returns all that it may apply."""
    _check_kinds(recipe)
    for way in ways(recipe):
        agree(way)
    if recipe.controller == Fixed():
        return []
    return [*recipe.controller.reach(replace(recipe, controller=Fixed()))]  # making a recipe checks it


def _check_kinds(recipe: Any) -> None:
    for value, kind in (recipe.memory, Memory), (recipe.schedule, Schedule), (recipe.controller, Controller):
        if not isinstance(value, kind):
            raise RecipeError(f"{value!r} is no {kind.kind}")
    if not isinstance(recipe.update, Update | None):
        raise RecipeError(f"{recipe.update!r} is no update")
    exchange = recipe.exchange
    if not isinstance(exchange, Exchange):
        bare = isinstance(exchange, Codec | LinearCodec)
        hint = f"put it in one: {composed(exchange)}" if bare else "name one first"
        raise RecipeError(f"{exchange!r} is no exchange; {hint}")


def ways(recipe: Any) -> Iterator[Way]:
    """The exchange and memory of every kind of parameter: the default, and those of rules and routes."""
    after: dict[str, Constrained] = {"schedule": recipe.schedule, "controller": recipe.controller}
    if recipe.update is not None:
        after["update"] = recipe.update
    usual: dict[str, Constrained] = {"memory": recipe.memory, "exchange": recipe.exchange}
    singled = "rules" if recipe.rules else "routes" if recipe.routes else ""
    yield after | usual | ({"rules": ConstrainedRules(singled)} if singled else {})
    for rule in recipe.rules:
        yield after | rule.parties
    for exchange in dict.fromkeys(recipe.routes.values()):
        yield after | usual | {"exchange": exchange}


def composed(codec: Codec | LinearCodec) -> str:
    """The recipe that a bare codec usually stands for.

    >>> composed(codecs.Ternary()), composed(codecs.FP32())
    ('scatter(ternary())', 'allreduce(fp32())')
    >>> composed(codecs.PowerSGD())
    'allreduce(powersgd()) + error_feedback()'
    """
    if codec.needs_feedback and not (codec.contracts or codec.bounds_residual):
        return f"scatter({codec}) + none(allow_biased=True)"
    feedback = " + error_feedback()" if codec.needs_feedback else ""
    if not isinstance(codec, Codec) or isinstance(codec, codecs.FP32):
        return f"allreduce({codec}){feedback}"
    return f"{'gather' if feedback or codec.whole else 'scatter'}({codec}){feedback}"
