"""Every preset, and recipes with every registered part that no preset has: nobody has to remember a new one."""

import inspect
from functools import cache
from typing import Any

import torch
from tests.gpu.loops import Plan
from tests.laws import samples

from gossamer.bench.catalogue import parts_of
from gossamer.core.contracts import Mixer
from gossamer.core.errors import AttachError
from gossamer.core.parts import registry
from gossamer.integrations.checks.devices import refuse_lengths
from gossamer.recipe import Recipe
from gossamer.recipes import presets

SHORT = {
    "steps": 8,
    "every": 2,
    "epoch": 2,
    "interval": 1,
    "freeze": 2,
    "learn": 2,
}  # steps, so that something happens in few of them
BUCKET = " + bucket(0.025)"  # three channels on the judges' model, where a recipe cuts it at all
SMALL = " + bucket(0.015)"  # five, where two at a time are on their way

# Worth trying besides: what they do on a GPU is their own.
BESIDES = (
    "allreduce(ternary())",
    "gather(topk(ratio=0.3, scope='global')) + error_feedback()",
    "allreduce(fp32()) + every_step(micro_batches=2, rate=2.0)",
    "scatter(topk(ratio=0.3), answer=bf16()) + error_feedback()",
    "allreduce(fp32()) + gossip(push_sum(ring()), every=2, overlap=True)",
    "allreduce(powersgd(factors='fp16')) + error_feedback()",
    "gather(dropping(warmup=0)) + error_feedback()",
    "scatter(qsgd()) + backup_workers()",
    "nodes(scatter(qsgd()), 2)",
    "allreduce(fp32()) + local_sgd(2) + adacomm(2)",
    "allreduce(fp32()) + by_speed(local_sgd(1))",  # with more, ranks take unlike numbers of steps
    "nodes(allreduce(powersgd()), 2) + error_feedback()",
    *(f"gather(qsgd(), mean={mean})" for mean in ("clipped(1.0)", "median()", "trimmed(1)")),
)

# Recipes with the parts that come with a recipe's text only.
RULES = {
    "rule": "allreduce(powersgd()) + error_feedback() + rule('ndim < 2', allreduce(fp32()))",
    "route": "accordion(2, interval=1)",  # a controller makes routes
    "bucket": "allreduce" + BUCKET,
    "per_node": "scatter(qsgd()) + per_node(2)",
}


@cache
def short_presets() -> dict[str, str]:
    """Every preset that a GPU takes by name, as the text of a recipe whose rounds and epochs are short."""
    out = dict[str, str]()
    for name, make in presets().items():
        parameters = inspect.signature(make).parameters.values()
        given = {p.name: SHORT[p.name] for p in parameters if p.name in SHORT}
        given |= {p.name: 2 for p in parameters if p.name == "warmup" and p.default is p.empty}
        if name == "sgp":
            given.clear()
        required = [p.name for p in parameters if p.default is p.empty and p.name not in given]
        assert not required, f"preset {name}: say in SHORT what {required} is"
        text = f"{name}({', '.join(f'{k}={v}' for k, v in given.items())})"
        if runs(Recipe.of(text)):
            out[name] = text
    return out


@cache
def with_parts() -> tuple[str, ...]:
    """For each registered part that no preset and nothing above has, the first recipe that has it.

    But for topologies, which are arithmetic: some are of an even number of ranks, or of as many as they name.
    """
    have = {part.name for text in [*short_presets().values(), *BESIDES] for part in parts_of(Recipe.of(text))}
    out = [*BESIDES, *dict.fromkeys(RULES.values())]
    names = {r: {part.name for part in parts_of(r)} for r in samples.recipes()}
    for name, part in registry.of().items():
        if name not in have | RULES.keys() and part.kind != "topology":
            having = [r for r in names if name in names[r]]
            assert having, f"no recipe has {name}"
            for found in filter(runs, having):
                have |= names[found]
                out.append(repr(found))
                break
    return tuple(out)


def runs(recipe: Recipe) -> bool:
    """Whether a GPU takes it: what says how long a message is must be known to the host."""
    try:
        refuse_lengths(recipe, torch.device("cuda"))
    except AttachError:
        return False
    return True


def ranks_of(text: str) -> int:
    """How many it takes: backup workers and robust means need one more, and so do two nodes of which one has two ranks."""
    return 3 if waits_for_few(text) or "mean=" in text or Recipe.of(text).groups(3) else 2


def waits_for_few(text: str) -> bool:
    return "waits for few" in Recipe.of(text).schedule.traits


def is_async(text: str) -> bool:
    """Whether ranks pair up at their own pace: in an even number, and what they do depends on time."""
    return Recipe.of(text).schedule.shape.is_async


def is_cut(text: str) -> bool:
    """Whether the model travels in buckets."""
    return "bucket" not in text and "whole" not in Recipe.of(text).schedule.traits


def talks_to_one(text: str) -> bool:
    """Whether it sends point to point."""
    recipe = Recipe.of(text)
    return (
        recipe.schedule.shape.mixes
        or recipe.schedule.shape.serves
        or any(isinstance(part, Mixer) for part in parts_of(recipe))
    )


@cache
def named() -> dict[str, str]:
    """All recipes that stand before the judges: presets by name, the others by their text."""
    return short_presets() | {text: text for text in with_parts()}


def plan_of(text: str, **changes: Any) -> Plan:
    """The run that most tests look at."""
    bucket = SMALL if talks_to_one(text) else BUCKET
    return Plan(text + bucket if is_cut(text) else text, **{"ranks": ranks_of(text)} | changes)


def plans_under_nccl(text: str) -> list[Plan]:
    """Two and three ranks, communicators made lazily and at once, groups with one backend, two, and no name.

    The first has few parameters, the second many. (`plan_of` is another one: two ranks, lazily, one backend.)
    """
    most = 2 if is_async(text) else 3
    plans = [
        Plan(text, ranks=most, eager=True, backends="undefined", warm=1, steps=2),
        Plan(text, ranks=most, eager=False, backends="cpu:gloo,cuda:nccl", depth=7, warm=1, steps=2),
    ]
    if talks_to_one(text) and most > 2:
        plans.append(Plan(text, ranks=2, eager=True, backends="undefined", warm=1, steps=2))
    return plans


@cache
def one_of_each_codec() -> tuple[str, ...]:
    """Besides, the first preset with each codec: what a device sees of a recipe."""
    found, out = set[str](), list[str]()
    for name, text in short_presets().items():
        codecs = {part.name for part in parts_of(Recipe.of(text)) if part.kind == "codec"}
        if name in one_of_a_kind() or codecs - found:
            out.append(name)
        found |= codecs
    return tuple(out)


@cache
def one_of_every_setting() -> tuple[str, ...]:
    """One preset for each exchange and setting of a schedule."""
    settings = dict[tuple[type, str], str]()
    for name, text in short_presets().items():
        recipe = Recipe.of(text)
        settings.setdefault((type(recipe.exchange), repr(recipe.schedule)), name)
    return tuple(settings.values())


@cache
def one_of_a_kind() -> tuple[str, ...]:
    """One of them for each exchange, schedule and mixer: what the network sees of a recipe."""
    kinds = dict[tuple[type, ...], str]()
    for name in one_of_every_setting():
        recipe = Recipe.of(short_presets()[name])
        kinds.setdefault((type(recipe.exchange), type(recipe.schedule), type(recipe.schedule.shape.mixer)), name)
    return tuple(kinds.values())
