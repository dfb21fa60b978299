"""Which parts go together. What cannot be right is refused, with the reason and the fix.

No part is known by name here: each says what it gives (its traits) and what it wants (its terms, see `core.constraints`).
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
"""All that the numbers of a parameter go through, by role."""


@dataclass(frozen=True)
class ConstrainedRules:
    """The rules or routes of a recipe, which send some parameters another way than the rest."""

    word: str
    constraints: tuple[Constraint, ...] = ()

    @property
    def traits(self) -> frozenset[str]:
        return those(singles_out=True)

    def __str__(self) -> str:
        return self.word


def check(recipe: Any) -> None:
    """Refuse a recipe that cannot be right, or whose controller could put such a one in force."""
    _check_kinds(recipe)
    for way in ways(recipe):
        agree(way)
    if recipe.controller != Fixed():
        for _ in recipe.controller.reach(replace(recipe, controller=Fixed())):
            pass  # to be made is to be checked


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
    """Every way that a parameter may go: the usual one, and those of rules and routes."""
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
    """The recipe that is normally meant by a codec.

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
