"""Recipes are values: read from text, presets, parts and TOML files, and printed as what they are read from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.laws import samples
from torch import Tensor

from gossamer import recipes
from gossamer.codecs import FP32, QSGD, PowerSGD, Ternary, TopK
from gossamer.controllers import Accordion, Fixed
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Controller, Exchange, Facts
from gossamer.core.errors import RecipeError
from gossamer.exchanges import AllReduced, Gather, Scatter
from gossamer.memories import DIANA, ErrorFeedback, NoMemory
from gossamer.recipe import BucketSize, Recipe, Rule, from_toml, read_toml
from gossamer.runtime.controller_runner import numbers
from gossamer.schedules import EveryStep, SlowMo

RULES = (
    Rule("ndim < 2", AllReduced(FP32())),
    Rule("name == 'it\\'s \"odd\"*' or not numel >= 10", Gather(TopK()), ErrorFeedback()),
    Rule('name != "a\\\\b"', Scatter(QSGD())),
)
NAMES = ("body.weight", 'it\'s "odd"*', "ä\n'\\[0]", "")


def decided(recipe: Recipe) -> list[Recipe]:
    """What a recipe's controller puts in force when gradients come and go, each parameter's in its own epochs."""
    state, found = State(), {repr(recipe): recipe}
    for step in range(1, 61):
        sizes = [(10.0 if (step // 10 + i) % 3 else 1.0) for i in range(len(NAMES))]
        blocks = [Bucket.of({name: torch.full((2,), size)}) for name, size in zip(NAMES, sizes, strict=True)]
        control = recipe.controller
        sums = [told_by_two(control, b, recipe.exchange) for b in blocks] if control.counts else []
        recipe = control.decide(Facts(step, 0.01 if step > 55 else 0.1, blocks, sums, loss=6 / step), recipe, state)
        found[repr(recipe)] = recipe
    return list(found.values())


def told_by_two(control: Controller, mean: Bucket, exchange: Exchange) -> Tensor:
    """What two ranks tell whose gradients have this mean, and are far from each other."""
    own = (Bucket(times * mean.flat, mean.layout) for times in (4, -2))
    return torch.stack([numbers(control, block, exchange) for block in own]).sum(0)


BY_HAND = (
    Recipe(AllReduced(FP32()), rules=RULES),
    Recipe(AllReduced(FP32()), bucket=BucketSize(0.5)),
    Recipe(AllReduced(FP32()), rules=RULES, routes={"a": Gather(QSGD()), "b": Scatter(QSGD()), "c": Gather(QSGD())}),
)


def reads_back(recipe: Recipe, folder: Path) -> None:
    again = Recipe.of(repr(recipe))
    assert again == recipe
    assert hash(again) == hash(recipe)
    file = folder / "recipe.toml"
    file.write_text(recipe.to_toml(), encoding="utf-8")
    assert Recipe.of(file) == recipe


def test_a_file_may_be_named_by_a_path_or_by_a_text(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    for recipe in (*BY_HAND, *samples.preset_recipes().values()):
        file.write_text(recipe.to_toml(), encoding="utf-8")
        for source in (str(file), f"  {file}\n"):
            assert Recipe.of(source) == recipe


@cache
def shown() -> tuple[Recipe, ...]:
    """Of all that can be put together each part with each kind of exchange: a text is that of its parts."""
    return tuple(param.values[0] for param in samples.quick(samples.recipes()) if not param.marks)


few_and_all = pytest.mark.parametrize(
    "put_together",
    [shown, pytest.param(samples.recipes, marks=pytest.mark.slow)],
    ids=["of each kind one", "all"],
)


@few_and_all
def test_a_recipe_reads_back_from_its_text_and_from_toml(
    tmp_path: Path, put_together: Callable[[], tuple[Recipe, ...]]
) -> None:
    """One test goes through all of a thousand and more far sooner than a test each."""
    every = [*put_together(), *samples.preset_recipes().values(), *BY_HAND]
    assert len(every) > (1000 if put_together is samples.recipes else 200)
    for recipe in every:
        reads_back(recipe, tmp_path)


@few_and_all
def test_what_a_controller_puts_in_force_reads_back_too(
    tmp_path: Path, put_together: Callable[[], tuple[Recipe, ...]]
) -> None:
    controlled = {r: decided(r)[1:] for r in put_together() if r.controller != Fixed()}
    moved = {r.controller.name for r, found in controlled.items() if found}
    assert moved == {r.controller.name for r in controlled}  # every controller decides something
    every = list(dict.fromkeys(found for each in controlled.values() for found in each))
    assert any(0 < len(r.routes) < len(NAMES) for r in every)
    for recipe in every:
        reads_back(recipe, tmp_path)


@given(st.text(min_size=1, max_size=20))
def test_any_parameter_name_survives_text_and_toml(name: str) -> None:
    import tomllib

    recipe = Recipe(AllReduced(FP32()), rules=(Rule(f"name == {name!r}", Scatter(QSGD())),))
    assert Recipe.of(repr(recipe)) == recipe
    assert from_toml(tomllib.loads(recipe.to_toml())) == recipe


def test_a_toml_file_shows_only_what_differs_from_the_default() -> None:
    assert Recipe.of("allreduce").to_toml() == "exchange = 'allreduce(fp32())'\n"
    assert Recipe.of("topk + slowmo(8) + bucket(2.0)").to_toml().splitlines() == [
        "exchange = \"gather(topk(scope='block'))\"",
        "memory = 'error_feedback()'",
        "schedule = 'slowmo(8)'",
        "bucket = 'bucket(2.0)'",
    ]


def toml(tmp_path: Path, text: str) -> Recipe:
    file = tmp_path / "r.toml"
    file.write_text(text)
    return read_toml(file)


def test_a_toml_file_may_start_from_a_preset_and_change_it(tmp_path: Path) -> None:
    expected = Recipe.of("terngrad + slowmo(8)")
    assert toml(tmp_path, 'recipe = "terngrad + slowmo(8)"') == expected
    assert toml(tmp_path, 'recipe = "terngrad"\nschedule = "slowmo(8)"') == expected
    assert toml(tmp_path, 'schedule = "slowmo(8)"\nrecipe = "terngrad"') == expected
    ruled = toml(tmp_path, 'recipe = "powersgd"\nrules = ["rule(\'ndim < 2\', allreduce(fp32()))"]')
    assert ruled == Recipe.of("powersgd + rule('ndim < 2', allreduce(fp32()))")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('exchnge = "allreduce(fp32())"', ["no entry 'exchnge'", "Did you mean 'exchange'?"]),
        ("exchange = 3", ["exchange must be a text", "got 3"]),
        ('exchange = ["allreduce(fp32())", 4]', ["exchange must be a text", "got 4"]),
        ('exchange = "allreduce(fp32())"\nmemory = "slowmo(8)"', ["memory must be one memory", "slowmo(8)"]),
        ('exchange = "gather(qsgd()) + diana()"', ["exchange must be one exchange"]),
        ('exchange = "qsgd()"', ["put it in an exchange: scatter(qsgd())"]),
        ('exchange = "terngrad"', ["no part called 'terngrad'", "ternary"]),
        ('memory = "diana()"', ["a recipe needs an exchange"]),
        ("", ["a recipe needs an exchange"]),
        ("exchange = ", ["not valid TOML"]),
        ('exchange = "gather("', ["'gather(' cannot be read"]),
        ('recipe = "qsgd(bits=99)"', ["bits"]),
        ('recipe = ["terngrad", "qsgd"]', ["one preset only"]),
        ('exchange = "gather(topk())"', ["is biased"]),
        ('rules = "gather(topk())"', ["rules must be one rule"]),
        ("[recipe]\nx = 1", ["recipe must be a text"]),
    ],
)
def test_a_toml_file_that_makes_no_sense_is_refused_in_words(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        toml(tmp_path, text)
    assert [w for w in words if w not in str(caught.value)] == [], caught.value
    assert str(caught.value).count("r.toml") == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(RecipeError, match=r"missing.toml cannot be read: No such file"):
        Recipe.of(missing)
    with pytest.raises(RecipeError, match=r"missing.toml cannot be read"):
        Recipe.of(str(missing))
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.of(folder)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not valid TOML"):
        Recipe.of(binary)


# -- presets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", samples.preset_recipes())
def test_a_preset_is_read_by_name_and_by_call(name: str) -> None:
    expected = samples.preset_recipes()[name]
    arguments = ", ".join(f"{word}=2" for word in samples.required(recipes.presets()[name]))
    assert Recipe.of(f"{name}({arguments})") == expected
    if not arguments:
        assert Recipe.of(name) == Recipe.of(f" {name} ") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("terngrad", Recipe(Scatter(Ternary(), answer=QSGD(3)))),
        ("terngrad(clip=0, levels=7)", Recipe(Scatter(Ternary(0.0, 7), answer=QSGD(5)))),
        ("terngrad + slowmo(8)", Recipe(Scatter(Ternary(), answer=QSGD(3)), schedule=SlowMo(8))),
        ("powersgd(rank=4)", Recipe(AllReduced(PowerSGD(4)), ErrorFeedback())),
        ("powersgd(4)", recipes.powersgd(rank=4)),
        ("topk(0.1, 'global')", Recipe(Gather(TopK(0.1, "global")), ErrorFeedback())),
        ("diana(bits=4, momentum=0.5, l1=0.1)", Recipe(Gather(QSGD(4)), DIANA(momentum=0.5), EveryStep(l1=0.1))),
        ("gather(qsgd()) + diana(momentum=0.5)", Recipe(Gather(QSGD()), DIANA(momentum=0.5))),
        ("qsgd + diana()", Recipe(Scatter(QSGD(bucket=128)), DIANA())),
        ("diana + local_sgd(8)", replace(recipes.diana(), schedule=recipes.local_sgd(8).schedule)),
        ("topk + none(allow_biased=True)", Recipe(Gather(TopK(scope="block")), NoMemory(allow_biased=True))),
        ("slowmo(8, beta=0.5)", recipes.slowmo(8, 0.5)),
        ("accordion(100)", recipes.accordion(epoch=100)),
    ],
)
def test_texts_mean_what_they_say(text: str, expected: Recipe) -> None:
    assert Recipe.of(text) == expected


def test_a_recipe_and_a_part_are_recipes_already() -> None:
    recipe = recipes.qsgd()
    assert Recipe.of(recipe) is recipe
    assert Recipe.of(Scatter(QSGD(bucket=128))) == recipe


def test_parts_may_come_in_any_order() -> None:
    assert Recipe.of("error_feedback() + gather(topk())") == Recipe.of("gather(topk()) + error_feedback()")


# -- rules --------------------------------------------------------------------------------------------------------


def fits(when: str, name: str = "layer.weight", shape: tuple[int, ...] = (3, 4)) -> bool:
    return Rule(when, AllReduced(FP32())).holds_for(name, shape)


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ("ndim < 2", False),
        ("ndim == 2", True),
        ("ndim != 2", False),
        ("ndim >= 2 and numel <= 12", True),
        ("ndim >= 2 and numel < 12", False),
        ("numel > 12 or name == 'layer.*'", True),
        ("not numel > 12", True),
        ("not (ndim == 2 and numel == 12)", False),
        ("not ndim == 2 or numel == 12", True),
        ("name == 'layer.weight'", True),
        ("name == 'LAYER.weight'", False),
        ("name == 'layer'", False),
        ("name == '*.w?ight'", True),
        ("name == '[a-l]*'", True),
        ("name != 'layer.*'", False),
        ("  ndim == 2  ", True),
    ],
)
def test_conditions_speak_of_dimensions_size_and_name(when: str, expected: bool) -> None:
    assert fits(when) == expected


def test_a_scalar_is_one_element_without_dimensions() -> None:
    assert fits("ndim == 0 and numel == 1", shape=())
    assert fits("numel == 0", shape=(0, 3))


@pytest.mark.parametrize(
    "when",
    [
        "",
        "ndim",
        "True",
        "ndim < 'a'",
        "ndim < 2.5",
        "ndim < True",
        "ndim < -1",
        "name < 'a'",
        "name == 3",
        "2 > ndim",
        "1 < ndim < 3",
        "size < 3",
        "ndim in (1, 2)",
        "ndim is 2",
        "name in 'abc'",
        "ndim + 1 < 2",
        "ndim <",
        "ndim < 2 if numel else 3",
        "__import__('os')",
        "lambda: 1",
        "not name",
        "(" * 500,
        "not " * 5000 + "ndim < 2",
        "ndim < 0x" + "f" * 6000 + " + 1",
        "name == '\0'" + "\0",
    ],
)
def test_conditions_without_sense_are_refused_when_the_rule_is_made(when: str) -> None:
    with pytest.raises(RecipeError, match="rule: "):
        Rule(when, AllReduced(FP32()))


def test_the_first_rule_that_fits_wins() -> None:
    recipe = Recipe.of(
        "powersgd + rule('name == \"head*\"', gather(qsgd(bits=8))) + rule('ndim < 2', allreduce(fp32()))"
        " + rule('numel > 5', gather(topk()), error_feedback(decay=0.5))"
    )
    assert recipe.way("head.bias", (3,)) == (Gather(QSGD(8)), NoMemory())
    assert recipe.way("body.bias", (30,)) == (AllReduced(FP32()), NoMemory())
    assert recipe.way("body.weight", (3, 3)) == (Gather(TopK()), ErrorFeedback(decay=0.5))
    assert recipe.way("small", (2, 2)) == (AllReduced(PowerSGD()), ErrorFeedback())


def test_rules_given_come_before_a_preset_s_own() -> None:
    own = Recipe(AllReduced(FP32()), rules=(RULES[0],))
    from gossamer.recipe import _assemble  # pyright: ignore

    assert _assemble((own, RULES[2])).rules == (RULES[2], RULES[0])


def test_rules_go_before_routes_and_routes_before_the_rest() -> None:
    mild, harsh = AllReduced(PowerSGD(4)), AllReduced(PowerSGD(1))
    base = Recipe(mild, ErrorFeedback(), controller=Accordion(mild, harsh, 10), rules=(RULES[0],))
    routed = base.route(mild, harsh, ["a", "b"])
    assert routed.way("a", (4, 4)) == (harsh, ErrorFeedback())
    assert routed.way("c", (4, 4)) == (mild, ErrorFeedback())
    assert routed.way("b", (4,)) == (AllReduced(FP32()), NoMemory())
    assert routed.route(mild, mild, ["a"]).routes == {}
    assert routed != base
    assert repr(routed) == repr(base) + " + route(('a', 'b'), allreduce(powersgd(rank=1)))"
    assert Recipe.of(repr(routed)) == routed


def test_routes_are_read_like_any_part_and_contradictions_are_refused() -> None:
    text = "allreduce + route(('a', 'b'), gather(qsgd())) + route(('c',), allreduce(bf16()))"
    recipe = Recipe.of(text)
    assert recipe.routes == {"a": Gather(QSGD()), "b": Gather(QSGD()), "c": Recipe.of("allreduce(bf16())").exchange}
    assert repr(recipe) == text.replace("allreduce +", "allreduce(fp32()) +")
    with pytest.raises(RecipeError, match="two routes give 'b' an exchange"):
        Recipe.of("allreduce + route(('a', 'b'), gather(qsgd())) + route(('b',), allreduce(bf16()))")
    with pytest.raises(RecipeError, match="at least one parameter's name"):
        Recipe.of("allreduce + route((), gather(qsgd()))")
    with pytest.raises(RecipeError, match="names must be a tuple, of a text each, got 'a'"):
        Recipe.of("allreduce + route('a', gather(qsgd()))")
    with pytest.raises(RecipeError, match="is biased"):
        Recipe.of("allreduce + route(('a',), gather(topk()))")
    with pytest.raises(RecipeError, match="routes cannot single out parameters"):
        Recipe.of("sgp + route(('a',), gather(qsgd()))")
    with pytest.raises(RecipeError, match="drop the routes"):
        Recipe.of("backup + route(('a',), gather(qsgd()))")


# -- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_is_the_exchange_s_own_unless_given() -> None:
    assert Recipe.of("terngrad + bucket(2.5)").bucket_mb == 2.5
    assert Recipe.of("terngrad").bucket_mb == Scatter(Ternary()).bucket_mb
    assert Recipe.of("allreduce + bucket(2)") == Recipe.of("allreduce + bucket(2.0)")
    assert all(r.bucket_mb > 0 for r in samples.recipes())


def test_a_recipe_is_frozen_and_has_defaults() -> None:
    recipe = Recipe(AllReduced(FP32()))
    assert (recipe.memory, recipe.schedule, recipe.controller, recipe.rules) == (NoMemory(), EveryStep(), Fixed(), ())
    with pytest.raises(AttributeError):
        recipe.memory = DIANA()  # pyright: ignore
