"""Instances of every registered part, so that a new part stands before every law without anyone remembering.

A part says itself what is typical of it. For settings worth trying besides, such as short rounds, add texts to `MORE`.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest

from gossamer import recipes as presets
from gossamer.core.contracts import (
    Codec,
    Controller,
    Exchange,
    LinearCodec,
    Memory,
    Mixer,
    Topology,
    Update,
)
from gossamer.core.errors import RecipeError
from gossamer.core.parts import Part, parse, registry
from gossamer.core.schedule import Schedule
from gossamer.memories import ErrorFeedback, NoMemory
from gossamer.recipe import Recipe
from gossamer.schedules import EveryStep, LocalSGD, Resync

MORE: dict[str, tuple[str, ...]] = {
    "adacomp": ("adacomp(bin=16)",),
    "accordion": ("accordion(scatter(qsgd(bits=8)), scatter(qsgd(bits=4)), 2, interval=1)",),
    "accordion_batch": ("accordion_batch(4, 2, interval=1)",),
    "dqsgd": ("dqsgd(10, bits=3.5, per='layer', final=0.01)", "dqsgd(10, error=0.01)"),
    "bmuf": ("bmuf(2, nesterov=True)",),
    "cocod": ("cocod(3, delay=1)",),
    "bernoulli": ("bernoulli(norm='l2', bucket=8)",),
    "atomo": (
        "atomo(svd(head=3), atoms=4)",
        "atomo(dct(length=8), share=0.3)",
        "atomo(entry(), share=0.3, draws='independent')",
    ),
    "count_sketch": (
        "count_sketch(ratio=0.1, candidates=2, rows=3)",
        "count_sketch(ratio=0.05, candidates=1, columns=10, choice='heavymix')",
    ),
    "diana": ("diana(alpha=0.25)", "diana(momentum=0.5)"),
    "eden": ("eden(bits=1, block=64)", "eden(bits=2)", "eden(bits=3, block=256)"),
    "error_feedback": ("error_feedback(decay=0.9)", "error_feedback(units='update')"),
    "every_step": ("every_step(micro_batches=2, rate=2.0)", "every_step(l1=0.01)"),
    "exponential": ("exponential(count=2)", "exponential(count=3)"),
    "fetch_sgd": ("fetch_sgd(ratio=0.05, rows=3, momentum=0.0, error='subtract')",),
    "fp4": ("fp4(format='e3m0', block=32, scale='e8m0')", "fp4(block=7, scale='ocp', rounding='nearest')"),
    "fp8": ("fp8(format='e5m2', block=32, scale='e8m0')", "fp8(block=7, scale='ocp', rounding='nearest')"),
    "backup_workers": ("backup_workers(backups=0)",),
    "gossip": ("gossip(every=2)", "gossip(overlap=True)", "gossip(warmup=2, exact=3)"),
    "int8": ("int8(block=7, scale='bf16', rounding='nearest')",),
    "local_sgd": ("local_sgd(2)", "local_sgd(2, warmup=2)"),
    "momentum_correction": ("momentum_correction(momentum=0.0)", "momentum_correction(masking=False)"),
    "natural": ("natural(bits=9)",),
    "nodes": (
        "nodes(allreduce(fp32()), 2)",
        "nodes(scatter(qsgd(bits=4, bucket=16)), 2)",
        "nodes(gather(topk(ratio=0.3, index='rice')), 2)",
        "nodes(allreduce(powersgd()), 2)",
        "nodes(nodes(scatter(topk(ratio=0.3)), 2), 2, inside=scatter(bf16()))",
    ),
    "none": ("none(allow_biased=True)",),
    "overlap_local_sgd": ("overlap_local_sgd(2)", "overlap_local_sgd(2, beta=0.0)"),
    "powersgd": (
        "powersgd(rank=1)",
        "powersgd(rank=7, min_ratio=1.0)",
        "powersgd(ratio=3.0, start='svd', factors='fp16')",
    ),
    "push_sum": ("push_sum(topology=ring())", "push_sum(topology=complete())"),
    "qsgd": (
        "qsgd(bits=1, bucket=7)",
        "qsgd(bits=2)",
        "qsgd(bits=3, bucket=64, norm='l2')",
        "qsgd(bits=8, bucket=1)",
        "qsgd(code='rice', levels=5, norm='l2', bucket=64)",
    ),
    "quorum_rounds": ("quorum_rounds(2, weigh='equal', least=2, delayed=0.1)",),
    "rule": ("rule(\"name == 'a*'\", gather(topk()), error_feedback())",),
    "scatter": (
        "scatter(ternary(), answer=ternary(levels=3))",
        "scatter(qsgd(bits=2), answer=fp32())",
        "scatter(eden(bits=1), answer=eden(bits=2))",
        "scatter(topk(ratio=0.3), answer=bf16())",
        "scatter(bf16(), answer=topk(ratio=0.3))",
        "scatter(qsgd(bits=2), feedback=0.5)",
        "scatter(qsgd(bits=2), feedback=1.0)",
        "scatter(sign(scale='l2'), own='encoded')",
    ),
    "sign_columns": ("sign_columns(threshold='mean')",),
    "sign": ("sign(scale='l2')", "sign(scale='one')"),
    "slowmo": (
        "slowmo(2)",
        "slowmo(2, buffers='average')",
        "slowmo(2, buffers='reset')",
        "slowmo(2, inner=push_sum())",
        "slowmo(2, inner=gossip(overlap=True))",
        "slowmo(2, inner=every_step(), nesterov=True)",
        "slowmo(3, inner=push_sum(), average=False)",
    ),
    "dropping": ("dropping(ratio=0.05, warmup=8)",),
    "own_gradient": (
        "own_gradient('sum')",
        "own_gradient('errors')",
        "own_gradient(units='update')",
    ),
    "randk": ("randk(ratio=0.3, scaled=True)",),
    "resync": ("resync(3, buffers='average')",),
    "streaming": ("streaming(3, 3, mixing=0.3)",),
    "ternary": ("ternary(clip=0.0)", "ternary(levels=7)", "ternary(clip=0.0, levels=127)"),
    "topk": (
        "topk(ratio=0.3)",
        "topk(ratio=0.3, scope='block')",
        "topk(ratio=1.0)",
        "topk(ratio=0.3, scope='global')",
        "topk(ratio=0.3, index='rice')",
        "topk(ratio=0.3, index='elias_fano')",
        "topk(ratio=0.05, scope='global', index='rice')",
    ),
}


def plainest(part: type[Part]) -> Part:
    """The part as it says itself that it is typical."""
    return parse(part.sample)


def samples(*kinds: str) -> list[Any]:
    """The plainest instance of every part of these kinds, and the others worth trying."""
    unheard = MORE.keys() - registry.of().keys()
    assert not unheard, f"tests/laws/samples.py speaks of parts that do not exist: {sorted(unheard)}"
    out = list[Any]()
    for name, part in registry.of(*kinds).items():
        for sample in (plainest(part), *map(parse, MORE.get(name, ()))):
            if sample not in out:
                out.append(sample)
    return out


def codecs() -> list[Codec]:
    return [c for c in samples("codec") if isinstance(c, Codec)]


def linear_codecs() -> list[LinearCodec]:
    return [c for c in samples("codec") if isinstance(c, LinearCodec)]


@cache
def exchanges() -> tuple[Exchange, ...]:
    """Every exchange around every codec that it accepts."""
    plain = samples("exchange")
    carriers = dict.fromkeys(type(e) for e in plain if any(f.name == "codec" for f in fields(e)))  # pyright: ignore
    carried = [e for make, codec in product(carriers, samples("codec")) for e in legal(make, codec)]
    return (*carried, *(e for e in plain if e not in carried))


@cache
def pairs() -> tuple[Recipe, ...]:
    """Every exchange with every memory that it bears; where models part, under a schedule that brings them together.

    Of memories under which they do, the plainest meets them all, and what it adds to a mean is the same whatever they are.
    """
    plain = [r for e, m in product(exchanges(), memories()) for r in legal(Recipe, e, m)]
    first, *others = [m for m in memories() if m.parts_models]
    parting = [*product(exchanges(), [first]), *((parse("gather(topk(ratio=0.3))"), m) for m in others)]
    return (*plain, *(r for e, m in parting for r in legal(Recipe, e, m, Resync(2))))


def quick(all_recipes: Iterable[Recipe]) -> list[Any]:
    """The same as parameters of a test, of which `make test` takes those that show something new.

    That is an exchange, or another part with an exchange of a class that it has not been seen with: what parts see of an
    exchange is the Echo, which has laws of its own, and what the class says. All others are slow, and few of a product.
    """
    seen, out = set[Any](), list[Any]()
    for r in sorted(all_recipes, key=lambda r: r.memory != ErrorFeedback()):  # what keeps books comes first
        e = r.exchange
        kind = type(e), e.traits, e.any_size, e.sum_rounding > 0
        others = r.schedule, r.controller, r.update, r.rules
        shown = {e, (kind, r.memory), (r.schedule, r.controller), *((type(e), other) for other in others)}
        out.append(pytest.param(r, id=repr(r), marks=[pytest.mark.slow] if shown <= seen else []))
        seen |= shown
    return out


def mixers() -> list[Mixer]:
    return samples("mixer")


def memories() -> list[Memory]:
    return samples("memory")


def schedules() -> list[Schedule]:
    """Mixers are driven by one. Those at their own pace have a law of their own, with their trait."""
    in_step = [s for s in samples("schedule") if not s.shape.is_async]
    return list(dict.fromkeys([*in_step, *(parse(f"gossip({m})") for m in mixers())]))


def unpaced() -> list[Schedule]:
    """Those whose ranks wait for nobody."""
    return [s for s in samples("schedule") if s.shape.is_async]


def updates() -> list[Update]:
    return samples("update")


def topologies() -> list[Topology]:
    return samples("topology")


def controllers() -> list[Controller]:
    return samples("controller")


CARRIERS = (
    "allreduce(fp32())",
    "scatter(qsgd(bits=4, bucket=16))",
)  # a dense one and a compressed one, for all that drives


def carried(schedule: Schedule) -> Iterator[Recipe]:
    """The schedule with what can carry it."""
    for exchange in map(parse, CARRIERS):
        yield from legal(Recipe, exchange, NoMemory(), schedule)


def updated(update: Update) -> Iterator[Recipe]:
    """The update over the exchanges of `CARRIERS`."""
    for exchange in map(parse, CARRIERS):
        yield from legal(partial(Recipe, update=update), exchange)


def controlled(controller: Controller) -> Iterator[Recipe]:
    """The controller over the exchanges that it names, and over those of `CARRIERS`."""
    named = [v for f in fields(controller) if isinstance(v := getattr(controller, f.name), Exchange)]  # pyright: ignore
    found = False
    for schedule in (EveryStep(), LocalSGD(2)):  # the latter for those that turn rounds only
        for exchange, memory in product((*named, *map(parse, CARRIERS)), (NoMemory(), ErrorFeedback())):
            for recipe in legal(Recipe, exchange, memory, schedule, controller):
                found = True
                yield recipe
        if found:
            return


def preset_recipes() -> dict[str, Recipe]:
    """Every preset; epochs and rounds that it must be told are of two steps."""
    return {name: make(**dict.fromkeys(required(make), 2)) for name, make in presets.presets().items()}


@cache
def recipes() -> tuple[Recipe, ...]:
    """All presets, every exchange with every memory it bears, every schedule and controller with what bears it."""
    carriers = [r for r in preset_recipes().values() if not r.schedule.shape.is_async]
    out = [*carriers, *pairs()]
    for base, schedule in product(carriers, schedules()):
        out += legal(Recipe, base.exchange, base.memory, schedule)
    for base, update in product(carriers, updates()):
        out += legal(partial(replace, update=update), base)
    for base, controller in product(carriers, controllers()):
        out += legal(Recipe, base.exchange, base.memory, base.schedule, controller)
    return tuple({repr(r): r for r in out}.values())


def legal(make: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """What is made of these arguments, or nothing where they are refused."""
    try:
        yield make(*arguments)
    except RecipeError:
        return


def required(make: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(make).parameters.values() if p.default is inspect.Parameter.empty]


__all__ = [
    "carried",
    "codecs",
    "controlled",
    "controllers",
    "exchanges",
    "legal",
    "linear_codecs",
    "memories",
    "mixers",
    "pairs",
    "plainest",
    "preset_recipes",
    "quick",
    "recipes",
    "samples",
    "schedules",
    "topologies",
    "unpaced",
    "updated",
    "updates",
]
