"""Samples of every part and preset, so that a new one is shown and tried without anyone remembering."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

from gossamer.codecs import FP32
from gossamer.controllers import Fixed
from gossamer.core.contracts import CodecExchange, Exchange
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, parse, registry
from gossamer.core.schedule import Schedule
from gossamer.exchanges import AllReduced
from gossamer.memories import ErrorFeedback, NoMemory
from gossamer.recipe import Recipe
from gossamer.recipes import presets
from gossamer.schedules import EveryStep

KINDS = {  # their plural, and what they decide
    "codec": ("codecs", "how a block of numbers is written as bytes"),
    "basis": ("bases", "what a gradient is a sum of"),
    "exchange": ("exchanges", "who talks to whom"),
    "mean": ("means", "what is made of the messages of all ranks"),
    "mixer": ("mixers", "how models are pulled together without agreeing"),
    "memory": ("memories", "what is kept back when a message does not say everything"),
    "update": ("updates", "what is made of an agreed gradient"),
    "schedule": ("schedules", "when there is an exchange"),
    "guard": ("guards", "how ranks count that go astray"),
    "controller": ("controllers", "how much, as training goes"),
    "topology": ("topologies", "who is whose neighbour"),
    "rule": ("rules", "which parameters go another way"),
    "route": ("routes", "which ones a controller sends another way for now"),
    "per_node": ("levels", "how many ranks share a node"),
    "bucket": ("buckets", "how much travels together"),
}
EPOCH, EVERY = 100, 8  # for presets that must know how many steps an epoch, or a round, has


@cache
def sample(name: str) -> Part:
    """The part as it says itself that it is typical."""
    return parse(registry.of()[name].sample)


def of(*kinds: str) -> list[Part]:
    return [sample(n) for n in registry.of(*kinds)]


@cache
def example(name: str) -> Recipe:
    """A preset with its defaults; those that must know the length of an epoch, or of the run, get 100 steps."""
    make = presets()[name]
    return make(**typical(make))


def typical(make: Callable[..., Any]) -> dict[str, Any]:
    """Values for the arguments of a part or a preset that have no default."""
    missing = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty]
    if isinstance(make, type) and issubclass(make, Part):
        return {n: getattr(sample(make.name), n) for n in missing}
    return {n: EPOCH if n in ("epoch", "steps") else EVERY for n in missing}


def parts_of(value: Any) -> Iterator[Part]:
    """A recipe's parts and theirs, each once, from the outside in."""
    yield from dict.fromkeys(_walk(value))


def _walk(value: Any) -> Iterator[Part]:
    if isinstance(value, Recipe):
        for v in [*value.parts(), *value.rules, *value.routes.values()]:
            yield from _walk(v)
    elif isinstance(value, Part):
        yield value
        for f in fields(value):  # pyright: ignore[reportArgumentType]
            yield from _walk(getattr(value, f.name))


@cache
def defaults() -> tuple[Part, ...]:
    """Parts that every recipe has unless it says otherwise: not worth naming."""
    return NoMemory(), EveryStep(), Fixed()


def users(name: str) -> list[str]:
    """The presets that have a part of this name."""
    return [p for p in presets() if any(x.name == name and x not in defaults() for x in parts_of(example(p)))]


def codec_exchanges() -> list[type[Part]]:
    """Exchanges that take a codec."""
    return [e for e in registry.of("exchange").values() if issubclass(e, CodecExchange)]


def carried(codec: Part) -> list[Any]:
    """Every exchange around this codec that is not refused."""
    made = list[Any]()
    for of_codec in codec_exchanges():
        try:
            made.append(of_codec(codec))  # pyright: ignore[reportCallIssue]
        except RecipeError:
            continue
    return made


def hosted(exchange: Any) -> Recipe:
    """A recipe of an exchange, with the memory that it needs; around votes, which send no sizes, there can be none."""
    biased = NoMemory(allow_biased=True) if exchange.votes else ErrorFeedback()
    return Recipe(exchange, biased if exchange.needs_feedback else NoMemory())


def showing(part: Part) -> list[Recipe]:
    """Recipes that show what a part costs on the wire."""
    if part.kind == "codec":
        return [hosted(e) for e in carried(part)]
    if type(part) in codec_exchanges():
        return [hosted(e) for c in of("codec") for e in carried(c) if type(e) is type(part)]
    if isinstance(part, Exchange):
        return [hosted(part)]
    if isinstance(part, Schedule):
        return [Recipe(AllReduced(FP32()), schedule=part)]
    if part.kind == "update":
        return [Recipe(AllReduced(FP32()), update=part)]  # pyright: ignore[reportArgumentType]
    mixer = {"mixer": f"{part}", "topology": f"push_sum({part})"}.get(part.kind)
    return [Recipe.of(f"allreduce(fp32()) + gossip({mixer})")] if mixer else []
