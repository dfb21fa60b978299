"""A space: the knobs of one recipe that a search turns, and those that it holds, with the reason.

Judged by quality alone, more bits are always better. So a knob that costs bytes is held at what the recipe says, unless
somebody asks for it, or all trials have the same budget of bytes: then what it costs is paid in steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gossamer.bench.tune.knobs import Knob, costs_bytes, knobs, turned
from gossamer.core.errors import GossamerError, RecipeError
from gossamer.core.parts import matches, nearest
from gossamer.core.ranges import Choice, LogRange, Range, Values
from gossamer.core.text import shown
from gossamer.recipe import Recipe

COSTS = "it costs bytes: give a --budget of them, or ask for it with --knob"
WORDS = {"True": True, "False": False, "None": None}
FACTORS = 10.0  # a range that is asked for and is as wide as this is searched by factors


class TuningError(GossamerError, ValueError):
    """A search that cannot be made as it was asked for."""


@dataclass
class Space:
    """A recipe, the knobs that are searched, the learning rate first, and why others with a range are not."""

    recipe: Recipe
    knobs: list[Knob]
    held: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchOverride:
    """A knob that somebody asked for: `ratio`, `topk.ratio`, `clip=1.5..4` or `norm=max,l2`."""

    name: str
    said: str = ""

    @staticmethod
    def of(text: str) -> "SearchOverride":
        name, _, said = text.partition("=")
        return SearchOverride(name.strip(), said.strip())

    def means(self, knob: Knob) -> bool:
        return self.name in (knob.name, knob.field)

    def apply(self, knob: Knob) -> Knob:
        """The knob with the values that were asked for."""
        if self.said:
            return replace(knob, values=_values(self, knob.hint))
        if knob.values is None:
            raise TuningError(
                f"{knob.name} has no range to search, since its part declares none; say which values are worth trying: "
                f"--knob {self.name}=LOW..HIGH, or --knob {self.name}=ONE,OTHER"
            )
        return knob


def space(
    recipe: Recipe, wishes: Sequence[SearchOverride], parameters: Mapping[str, Any], size: int, budget: bool
) -> Space:
    """What is searched of a recipe: all that has a range and costs no bytes, and all that was asked for."""
    made = Space(recipe, [])
    for knob in knobs(recipe):
        asked = [w for w in wishes if w.means(knob)]
        if asked:
            made.knobs.append(_legal(recipe, asked[-1].apply(knob)))
        elif knob.values is None:
            continue
        elif not budget and costs_bytes(recipe, knob, parameters, size):
            made.held[knob.name] = COSTS
        else:
            made.knobs.append(knob)
    return made


def check(wishes: Sequence[SearchOverride], recipes: Sequence[Recipe]) -> None:
    """Whoever asks for a knob that no recipe has meant another one."""
    known = [k for r in recipes for k in knobs(r)]
    for wish in wishes:
        if not any(wish.means(k) for k in known):
            names = [*(k.name for k in known), *(k.field for k in known if k.values)]
            raise TuningError(f"no recipe here has a knob {shown(wish.name)}. {nearest(wish.name, names)}")


def _legal(recipe: Recipe, knob: Knob) -> Knob:
    """What was asked for is refused before the first trial, not at the tenth."""
    if knob.is_lr:
        return _positive(knob)
    for value in knob.values.ends if knob.values else ():
        turned(recipe, knob, value)
    return knob


def _positive(knob: Knob) -> Knob:
    if knob.values and not all(isinstance(v, float) and 0 < v < float("inf") for v in knob.values.ends):
        raise TuningError(
            f"the learning rate is searched in positive multiples of the workload's own, not {knob.values}"
        )
    return knob


def _values(wish: SearchOverride, hint: Any) -> Values:
    low, dots, high = wish.said.partition("..")
    try:
        if not dots:
            return Choice(*(_read(word, hint) for word in wish.said.split(",")))
        ends = _read(low, hint), _read(high, hint)
        if not all(type(e) in (int, float) for e in ends):
            raise ValueError(f"{wish.said} is no range of numbers")
        return (LogRange if ends[0] > 0 and ends[1] >= FACTORS * ends[0] else Range)(*ends)
    except RecipeError:
        raise
    except ValueError as error:
        raise TuningError(f"--knob {wish.name}={wish.said}: {error}; write LOW..HIGH, or values with commas") from None


def _read(word: str, hint: Any) -> Any:
    """A value as the argument has it: a whole number is welcome where any is."""
    word = word.strip()
    value: Any = WORDS.get(word, word)
    for kind in (float, int):
        try:
            value = kind(word)
        except ValueError:
            continue
    if type(value) is int and not matches(value, hint):
        value = float(value)
    return value
