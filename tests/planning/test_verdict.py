"""The words of a plan: one rule each, on plans that call for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from gossamer.costs import from_flags
from gossamer.costs.quantities import Price
from gossamer.planning.model_shapes import known_model
from gossamer.planning.peak import PeakMemory
from gossamer.planning.plan import TrainingPlan, plan
from gossamer.planning.rates import Interval
from gossamer.planning.verdict import averages_every_step, sentences
from gossamer.planning.work import NoWork


@pytest.fixture(autouse=True)
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sentence says what a rank holds, which takes longest to find; tests/planning/test_peak.py sees to that."""
    monkeypatch.setattr(
        "gossamer.planning.plan.memory_of", lambda programs, model, keeps: PeakMemory(0, 0, 0, keeps, 0)
    )


def planned(rate: float, recipes: Sequence[str], nodes: int = 2, gpus: int = 1, curves: bool = False) -> TrainingPlan:
    return planned_once(rate, tuple(recipes), nodes, gpus, curves)


@cache
def planned_once(rate: float, recipes: tuple[str, ...], nodes: int, gpus: int, curves: bool) -> TrainingPlan:
    here = from_flags(nodes=nodes, gpus=gpus, rate=rate)
    return plan(known_model("gpt2", 0.35), here, recipes, work=NoWork(), curves=curves)


def test_where_dense_hides_it_says_leave_it_alone() -> None:
    said = sentences(planned(100e9, ["topk", "local_sgd(32)"]))
    assert said[0].startswith("Leave DDP alone: its network hides behind computing")


def test_where_nothing_gains_enough_on_bf16_it_says_so() -> None:
    said = sentences(planned(3.125e9, ["topk", "powersgd"]))
    assert said[0].startswith("Leave DDP alone, or turn on bf16: ")
    assert "less than this model can see" in said[0]


def test_a_small_gain_is_the_one_on_bf16_also_where_accumulation_takes_less() -> None:
    found = planned(3.125e9, ["topk", "powersgd"])
    usual = next(row for row in found.baselines if "micro" in row.name)
    assert usual.seconds is not None
    quick = replace(usual, seconds=replace(usual.seconds, step=usual.seconds.step / 2))
    rows = [replace(row, of={**row.of, usual.name: 2 * row.of[usual.name]}) for row in found.recipes]
    odd = replace(found, recipes=rows, baselines=[quick if row is usual else row for row in found.baselines])
    gain = 1 - rows[0].of["ddp-bf16"]
    assert gain > 0.01
    assert f"gains {gain:.0%} on it" in sentences(odd)[0]


def test_a_recipe_that_ties_with_the_fastest_is_not_called_the_fastest() -> None:
    """Of recipes within 5 %, one that averages gradients at every step is spoken of."""
    found = planned(3.125e9, ["topk", "powersgd"])
    first, *others = found.recipes
    assert first.seconds is not None
    quicker = replace(first, name="local_sgd(8)", seconds=replace(first.seconds, step=0.99 * first.seconds.step))
    said = sentences(replace(found, recipes=[quicker, first, *others]))[0]
    assert f": {first.name}, among the fastest recipes here, gains " in said


def test_where_one_pays_it_names_it_with_its_rate_and_its_price() -> None:
    said = sentences(planned(125e6, ["qsgd", "bf16"], curves=True))
    assert said[0].startswith("qsgd: ")
    assert "It pays below " in said[0]
    assert "times as many steps and still be ahead" in said[0]
    assert "'gossamer compare' measures it" in said[0]


def test_what_pays_on_the_fastest_link_too_pays_at_every_rate() -> None:
    """Each rank has a quarter of a core, which all-reduces of a whole model need more of than rounds do."""
    here = from_flags(nodes=4, rate=12.5e6, cores=0.25)
    found = plan(known_model("gpt2", 0.35, memory_rate=10e9), here, ["local_sgd(32)"], work=NoWork())
    assert "It pays at every rate on these machines." in sentences(found)[0]


def test_what_pays_on_fast_links_only_does_not_pay_at_every_rate() -> None:
    """As a gather of many wires, which are more bytes than a ring's, in half of its messages."""
    found = planned(125e6, ["qsgd"])
    rates = [Interval(125e3, 1e6), Interval(1e9, inf)]
    odd = replace(found, recipes=[replace(found.recipes[0], pays={"ddp": rates})])
    assert "It pays below 8 Mbit/s and above 8 Gbit/s on these machines." in sentences(odd)[0]


def test_rounds_are_named_with_the_best_that_averages_at_every_step() -> None:
    said = sentences(planned(12.5e6, ["local_sgd(32)", "qsgd"]))
    assert said[0].startswith("local_sgd(32): ")
    assert "Of recipes that average at every step, qsgd is fastest" in said[0]


def test_ties_are_ties() -> None:
    said = sentences(planned(125e6, ["local_sgd(32)", "slowmo(32)"]))
    assert any(line.startswith("Within 5% of the fastest: ") and "slowmo(32)" in line for line in said)


def test_it_says_what_to_change_first() -> None:
    said = sentences(planned(125e6, ["qsgd"]))
    (line,) = [line for line in said if line.startswith("What to change first")]
    assert "the recipe, to qsgd" in line
    assert "a link twice as fast" in line
    assert "two micro-batches a step" in line


def test_flat_recipes_on_shared_cards_are_warned_of() -> None:
    said = sentences(planned(125e6, ["bf16", "bf16 + per_node(8)"], nodes=4, gpus=8))
    (line,) = [line for line in said if line.startswith("Use two levels")]
    assert "add '+ per_node(8)'" in line
    assert "all 8 ranks of a node share a card, and bf16 put" in line


def test_where_latency_is_the_step_it_says_meet_less_often() -> None:
    here = from_flags(nodes=64, gpus=1, rate=125e6, latency=5e-3)
    found = plan(known_model("resnet50", 0.02), here, ["powersgd"], work=NoWork(), curves=False)
    assert any(line.startswith("Meet less often: latency is ") for line in sentences(found))


def test_sharded_models_are_compared_with_hsdp() -> None:
    here = from_flags(nodes=4, gpus=8, rate=1e9)
    found = plan(known_model("gpt2", 0.35), here, ["qsgd"], shards=8, work=NoWork(), curves=False)
    assert sentences(found)[0].startswith("qsgd: ")
    assert "HSDP" in sentences(found)[0]
    said = "Recipes are planned through the host and gloo"
    assert any(said in line for line in sentences(found))
    here = from_flags(nodes=4, ranks=8, rate=1e9)
    processors = plan(known_model("gpt2", 0.35), here, ["qsgd"], shards=8, work=NoWork(), curves=False)
    assert not any(said in line for line in sentences(processors))


def test_a_small_gain_on_shards_is_that_on_the_quickest_way_which_is_named() -> None:
    """Where FSDP over all ranks is as fast as the recipe, HSDP was to be left alone for a gain that was not on it."""
    here = from_flags(nodes=4, gpus=8, rate=1e9)
    found = plan(known_model("gpt2", 0.35), here, ["qsgd"], shards=8, work=NoWork(), curves=False)
    (row,), (hsdp, fsdp) = found.recipes, found.baselines
    assert row.seconds is not None
    assert fsdp.seconds is not None
    quick = replace(fsdp, seconds=replace(fsdp.seconds, step=row.seconds.step / 0.97))
    odd = replace(found, recipes=[replace(row, of={**row.of, "fsdp": 0.97})], baselines=[hsdp, quick])
    assert sentences(odd)[0].startswith("Leave FSDP alone: qsgd, among the fastest recipes here, gains 3% on it")


def test_what_is_cheaper_is_named_also_where_dense_hides_its_network() -> None:
    """All that was said was to leave DDP alone, however much each byte costs."""
    fast = from_flags(nodes=2, gpus=1, rate=100e9)
    here = replace(fast, hosts=(replace(fast.hosts[0], price=Price(2.0, "USD"), egress=Price(0.09, "USD")),))
    first, *others = sentences(plan(known_model("gpt2", 0.35), here, ["bf16", "topk"], work=NoWork(), curves=False))
    assert first.startswith("Leave DDP alone: its network hides behind computing")
    (line,) = [line for line in others if "1,000 steps cost" in line]
    assert " USD under topk, and " in line
    assert line.endswith(" USD under ddp-bf16.")
    free = replace(fast, hosts=(replace(fast.hosts[0], price=Price(2.0, "USD")),))
    said = sentences(plan(known_model("gpt2", 0.35), free, ["topk"], work=NoWork(), curves=False))
    assert not any("1,000 steps cost" in line for line in said)


def test_where_no_recipe_runs_it_says_so() -> None:
    assert sentences(planned(1e6, ["backup"]))[0].startswith("No recipe can be planned here")


@pytest.mark.parametrize(
    ("name", "does"), [("qsgd", True), ("backup", True), ("local_sgd(8)", False), ("sgp", False), ("slowmo(8)", False)]
)
def test_which_recipes_average_at_every_step(name: str, does: bool) -> None:
    assert averages_every_step(name) is does
