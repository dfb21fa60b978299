"""What is searched of a recipe: all that says over what, what was asked for, and nothing that costs bytes unasked."""

import pytest

from gossamer.bench.catalogue import example
from gossamer.bench.tune import TuningError
from gossamer.bench.tune.knobs import Knob, at_rate, knobs, turned
from gossamer.bench.tune.points import settings
from gossamer.bench.tune.space import SearchOverride, Space, check, space
from gossamer.core.errors import RecipeError
from gossamer.core.ranges import Choice, LogRange, Range
from gossamer.recipe import Recipe
from gossamer.recipes import presets

SHAPES: dict[str, tuple[int, ...]] = {"w": (300, 200), "b": (200,)}


def searched(text: str, *wishes: str, budget: bool = False) -> Space:
    return space(Recipe.of(text), [SearchOverride.of(w) for w in wishes], SHAPES, 4, budget)


def knob(text: str, name: str) -> Knob:
    return next(k for k in knobs(Recipe.of(text)) if k.name == name)


def test_the_learning_rate_comes_first_in_every_recipe() -> None:
    assert [k.name for k in searched("allreduce").knobs] == ["lr"]
    assert [k.name for k in searched("scatter(ternary())").knobs] == ["lr", "ternary.clip"]


def test_what_costs_bytes_is_held_unless_bytes_are_the_budget_or_somebody_asks() -> None:
    assert [k.name for k in searched("topk").knobs] == ["lr", "topk.scope", "error_feedback.decay"]
    assert "--budget" in searched("topk").held["topk.ratio"]
    assert "topk.ratio" in [k.name for k in searched("topk", budget=True).knobs]
    assert "topk.ratio" in [k.name for k in searched("topk", "ratio").knobs]
    assert searched("slowmo").held.keys() == {"slowmo.every"}
    assert {k.path[0] for k in searched("accordion_qsgd(100)").knobs if k.path} == {"exchange"}


def test_two_parts_of_one_name_are_told_apart_by_their_place() -> None:
    text = "scatter(qsgd(bits=2), answer=qsgd(bits=4)) + rule('ndim < 2', scatter(qsgd(bits=8)))"
    names = [k.name for k in knobs(Recipe.of(text)) if k.field == "bits"]
    assert names == ["exchange.codec.bits", "exchange.answer.bits", "rules.0.exchange.codec.bits"]
    other = turned(Recipe.of(text), knob(text, names[2]), 6)
    assert repr(other) == "scatter(qsgd(bits=2), answer=qsgd()) + rule('ndim < 2', scatter(qsgd(bits=6)))"


@pytest.mark.parametrize("name", presets())
def test_every_preset_has_settings_that_are_read_back(name: str) -> None:
    recipe = repr(example(name))
    found = settings(searched(recipe, budget=True), 12, seed=3)
    assert (found[0].recipe, found[0].lr) == (Recipe.of(recipe), 1.0)
    assert len({(s.recipe, s.lr) for s in found}) > 10  # rates are rounded for people, and may coincide
    for s in found:
        assert Recipe.of(repr(s.recipe)) == s.recipe


def test_all_recipes_are_tried_at_the_same_rates_and_more_trials_only_add() -> None:
    dense, sparse = (settings(searched(t), 9, seed=1) for t in ("allreduce", "topk"))
    assert [s.lr for s in dense] == [s.lr for s in sparse]
    assert settings(searched("topk"), 5, seed=1) == sparse[:5]
    assert [s.lr for s in settings(searched("topk"), 9, seed=2)] != [s.lr for s in sparse]


def test_values_that_do_not_go_together_are_passed_over() -> None:
    found = settings(searched("scatter(topk()) + error_feedback()"), 10, seed=0)  # of scopes, scatter takes two
    assert len(found) == 10
    assert {s.values.get("topk.scope", "tensor") for s in found} == {"tensor", "block"}


def test_the_rate_is_part_of_the_recipe_where_it_can_be() -> None:
    assert at_rate(Recipe.of("allreduce"), 0.5) == (Recipe.of("allreduce + every_step(rate=0.5)"), 1.0)
    assert at_rate(Recipe.of("allreduce + every_step(rate=4.0)"), 0.5)[0].schedule.shape.lr_factor == 2.0
    assert at_rate(Recipe.of("slowmo"), 0.5) == (Recipe.of("slowmo"), 0.5)


def test_a_level_of_a_controller_that_is_the_exchange_stays_it() -> None:
    text = "accordion_qsgd(100)"
    other = turned(Recipe.of(text), knob(text, "exchange.codec.bits"), 6)
    assert other == Recipe.of("accordion_qsgd(100, mild=6)")
    assert knob(text, "controller.harsh.codec.bits").values == Range(2, 8)


def test_ranges_that_are_asked_for() -> None:
    wished = searched("topk", "ratio=0.001..0.5", "index=int32,rice", "decay=0.5..1", "lr=0.5..2").knobs
    values = {k.field: k.values for k in wished}
    assert values["ratio"] == LogRange(0.001, 0.5)
    assert values["index"] == Choice("int32", "rice")
    assert values["decay"] == Range(0.5, 1.0)
    assert values["lr"] == Range(0.5, 2.0)
    assert {k.field: k.values for k in searched("qsgd", "bits=2,4").knobs}["bits"] == Choice(2, 4)


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("index", "topk.index has no range to search.*--knob index=LOW..HIGH"),
        ("ratio=0.1..0.001", "the lower one first"),
        ("ratio=a..b", "no range of numbers"),
        ("lr=0", "positive"),
    ],
)
def test_knobs_that_cannot_be_searched(wish: str, says: str) -> None:
    with pytest.raises(TuningError, match=says):
        searched("topk", wish)


def test_values_that_the_part_refuses_are_refused_with_its_reason() -> None:
    with pytest.raises(RecipeError, match=r"topk: ratio must lie in \(0, 1\]"):
        searched("topk", "ratio=0.5..2")
    with pytest.raises(RecipeError, match="qsgd: bits must be a whole number"):
        searched("qsgd", "bits=2.5,4")


def test_a_knob_that_no_recipe_has_is_a_slip() -> None:
    recipes = [Recipe.of("allreduce"), Recipe.of("topk")]
    check([SearchOverride.of("topk.ratio"), SearchOverride.of("lr")], recipes)
    with pytest.raises(TuningError, match=r"no recipe here has a knob 'ratoi'\. Did you mean 'ratio'"):
        check([SearchOverride.of("ratoi=0.1")], recipes)
