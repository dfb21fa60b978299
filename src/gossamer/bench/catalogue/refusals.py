"""What is refused, found by trying: no list to keep, and none that can be out of date."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn

from gossamer.bench.catalogue.samples import codec_exchanges, hosted, of, sample, typical
from gossamer.codecs import FP32
from gossamer.core.contracts import Codec, Exchange, LinearCodec
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.parts import Part, registry
from gossamer.exchanges import AllReduced
from gossamer.integrations.attach import check as check_model
from gossamer.integrations.ddp import check as check_hook
from gossamer.memories import NoMemory
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, params_of

PARTNERS = ("memory", "update", "schedule", "controller", "rule")


class Refusal(NamedTuple):
    """Something that was tried, the answer, and the parts that it is about."""

    text: str
    message: str
    about: frozenset[str] = frozenset()


def attempt(make: Callable[[], Any]) -> str:
    """What is said against it, or nothing."""
    try:
        make()
    except (RecipeError, AttachError) as error:
        return str(error)
    return ""


# -- of one recipe ---------------------------------------------------------------------------------------------------------


def refused_with(recipe: Recipe, name: str) -> list[Refusal]:
    """What cannot be had together with a recipe: other parts, other exchanges for its codec, and ways to attach it."""
    found = [*_codec_elsewhere(recipe), *_partners(recipe, name), *_attached(recipe, name)]
    return [r for r in dict.fromkeys(found) if r.message]


def _codec_elsewhere(recipe: Recipe) -> Iterator[Refusal]:
    codec = getattr(recipe.exchange, "codec", None)
    for of_codec in codec_exchanges() if isinstance(codec, Codec | LinearCodec) else ():
        yield Refusal(f"{of_codec.name}({codec})", attempt(lambda: of_codec(codec)))  # pyright: ignore  # noqa: B023


def _partners(recipe: Recipe, name: str) -> Iterator[Refusal]:
    for kind in PARTNERS:
        for part in registry.of(kind):
            for partner in _variants(_fitting(part, recipe.exchange)):
                refusal = Refusal(f"{name} + {partner}", attempt(lambda: _with(recipe, partner)))  # noqa: B023
                yield refusal
                if refusal.message:
                    break  # other arguments would be refused alike


def _with(recipe: Recipe, part: Part) -> Recipe:
    if part.kind == "rule":
        return replace(recipe, rules=(part,))
    return replace(recipe, **{part.kind: part})


def _fitting(name: str, exchange: Any) -> Part:
    """A sample that could go with the exchange: a controller's levels are that exchange."""
    plain = sample(name)
    if plain.kind != "controller":
        return plain
    levels = {f.name: exchange for f in fields(plain) if isinstance(getattr(plain, f.name), Exchange)}  # pyright: ignore
    return replace(plain, **levels)  # pyright: ignore[reportArgumentType, reportCallIssue]


@cache
def _variants(part: Part) -> tuple[Part, ...]:
    """A part as it is, and with each of its arguments changed: asked for beside each preset."""
    found, hints = [part], get_type_hints(type(part))
    for f in fields(part):  # pyright: ignore[reportArgumentType]
        value, hint = getattr(part, f.name), hints[f.name]
        others = [v for v in get_args(hint) if v != value] if get_origin(hint) is Literal else []
        others += [not value] if hint is bool else [value + 1] if hint in (int, float) else []
        for other in others:
            changed: dict[str, Any] = {f.name: other}
            if not attempt(lambda: replace(part, **changed)):  # pyright: ignore  # noqa: B023
                found.append(replace(part, **changed))  # pyright: ignore[reportArgumentType, reportCallIssue]
    return tuple(found)


def _attached(recipe: Recipe, name: str) -> Iterator[Refusal]:
    """Models and options that `attach` refuses, and whether the recipe can be DDP's hook."""
    plain, normed = nn.Linear(2, 2), nn.BatchNorm1d(2)
    ways: dict[str, Callable[[], Any]] = {
        "attach(a model with BatchNorm, ...)": lambda: check_model(normed, recipe),
        "attach(..., buffers='average')": lambda: check_model(plain, recipe, buffers="average"),
        "attach(..., scaler=GradScaler())": lambda: check_model(plain, recipe, scaler=object()),
        "attach(..., find_unused_parameters=True)": lambda: check_model(plain, recipe, find_unused_parameters=True),
        "attach(a model in two precisions, ...)": lambda: _in_two_precisions(recipe),
        f"gossamer.ddp.register(ddp_model, {name!r})": lambda: check_hook(recipe),
    }
    if "waits for few" in recipe.schedule.traits:
        few = next((n for n in range(1, 64) if not attempt(partial(bytes_per_step, recipe, {"w": (16, 16)}, n + 1))), 1)
        ways[f"training on {few} rank{'s' * (few > 1)}"] = lambda: bytes_per_step(recipe, {"w": (16, 16)}, few)
    for text, way in ways.items():
        yield Refusal(text, attempt(way))


def _in_two_precisions(recipe: Recipe) -> Worker:
    named = {"a": torch.zeros(16, 16, dtype=torch.float32), "b": torch.zeros(16, 16, dtype=torch.float64)}
    # Making one of torch's takes it a second, and a worker only asks for the groups.
    plain = {"momentum": 0, "dampening": 0, "nesterov": False}
    optimizer = SimpleNamespace(param_groups=[{"params": [*named.values()], "lr": 1.0, **plain}])
    return Worker(recipe, params_of(named), cast(torch.optim.Optimizer, optimizer), rank=0, size=6)


# -- of one part, or all ---------------------------------------------------------------------------------------------------


@cache
def pairs() -> tuple[Refusal, ...]:
    """Every pair of parts that cannot be right together."""
    found = [*_pairs_of_codecs(), *_pairs_with_memories(), *_pairs_with_exchanges()]
    return tuple(dict.fromkeys(r for r in found if r.message))


def _pairs_of_codecs() -> Iterator[Refusal]:
    for of_codec in codec_exchanges():
        for codec in of("codec"):
            message = attempt(lambda: of_codec(codec))  # pyright: ignore  # noqa: B023
            yield Refusal(f"{of_codec.name}({codec})", message, frozenset({of_codec.name, codec.name}))


def _exchanges() -> Iterator[Any]:
    """One exchange for each codec, and those without a codec."""
    for codec in of("codec"):
        yield next(c(codec) for c in codec_exchanges() if not attempt(lambda: c(codec)))  # pyright: ignore  # noqa: B023
    yield from (e for e in of("exchange") if type(e) not in codec_exchanges())


def _pairs_with_memories() -> Iterator[Refusal]:
    for exchange in _exchanges():
        schedule, about = hosted(exchange).schedule, getattr(exchange, "codec", exchange).name
        for memory in of("memory"):
            message = attempt(lambda: Recipe(exchange, memory, schedule))  # pyright: ignore  # noqa: B023
            text = f"{exchange}" if memory == NoMemory() else f"{exchange} + {memory}"
            yield Refusal(text, message, frozenset({about, memory.name}))


def _pairs_with_exchanges() -> Iterator[Refusal]:
    """Schedules, controllers and rules with every exchange that has no codec, and with the plain one."""
    for exchange in (AllReduced(FP32()), *(e for e in _exchanges() if not hasattr(e, "codec"))):
        recipe = hosted(exchange)
        for part in of("schedule", "controller", "rule"):
            message = attempt(lambda: _with(recipe, part))  # noqa: B023
            yield Refusal(f"{exchange} + {part}", message, frozenset({exchange.name, part.name}))


def wrong_values(make: Callable[..., Any]) -> list[str]:
    """What a part or a preset says to arguments out of range."""
    hints, said = get_type_hints(make), dict[str, None]()
    accepted = inspect.signature(make).parameters
    needed = typical(make)
    for name in accepted:
        numeric = {int, float} & {hints[name], *get_args(hints[name])}
        tried = map(float if float in numeric else int, (-1, 0, 1, 2, 1000) if numeric else ())
        answers = (attempt(lambda: make(**{**needed, name: value})) for value in tried)  # noqa: B023
        said[next(filter(None, answers), "")] = None
    return [message for message in said if message]
