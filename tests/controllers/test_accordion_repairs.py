"""Accordion repairs a setting in which PowerSGD of rank 1 visibly loses, and over other knobs it decides as well."""

from pathlib import Path

import pytest
import torch
from tests.controllers.repairs import RECIPES, curve

from gossamer.core.bucket import Bucket
from gossamer.core.contracts import Facts
from gossamer.core.events import Decision
from gossamer.core.parts import Part
from gossamer.fabrics.ledger import Ledger
from gossamer.recipe import Recipe

KNOBS = {
    "rank": ("allreduce(powersgd(rank=4))", "allreduce(powersgd(rank=1))"),
    "ratio": ("allreduce(powersgd(ratio=2.0))", "allreduce(powersgd(ratio=8.0))"),
    "factors": ("allreduce(powersgd())", "allreduce(powersgd(factors='fp16'))"),
    "k": ("gather(topk(ratio=0.5))", "gather(topk(ratio=0.02))"),
    "k in chunks": ("scatter(topk(ratio=0.5))", "scatter(topk(ratio=0.02))"),
    "bits": ("scatter(qsgd(bits=8, bucket=16))", "scatter(qsgd(bits=4, bucket=16))"),
    "levels": ("allreduce(ternary(levels=7))", "allreduce(ternary())"),
}


def test_it_repairs_what_rank_one_spoils_and_sends_less_than_rank_eight() -> None:
    lost, mild, repaired = (curve(RECIPES[name]) for name in ("rank 1", "rank 8", "accordion"))
    assert min(lost.distances[4:]) > 10
    assert max(repaired.distances[3:]) < 0.2
    assert min(repaired.distances[-4:]) < 1.2 * min(mild.distances[-4:])
    assert sum(repaired.sent) < 0.75 * sum(mild.sent)
    assert min(repaired.sent) == min(lost.sent)
    assert max(repaired.sent) == max(mild.sent)
    assert repaired.decided[0].endswith("allreduce(powersgd(rank=1, min_ratio=1.0)) for weight")
    assert not mild.decided


def test_a_ledger_keeps_decisions_in_its_file(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.hear(Decision(7, 0, "gather(topk()) for all 3 parameters"))
    ledger.write(tmp_path / "ledger")
    assert (
        Ledger.read(tmp_path / "ledger").decisions
        == ledger.decisions
        == [Decision(7, 0, "gather(topk()) for all 3 parameters")]
    )


@pytest.mark.parametrize("knob", KNOBS)
def test_any_knob_of_any_codec_may_be_turned(knob: str) -> None:
    """Sums of gradients that stay alike: after two looks the harsh level is in force, for the parameter that is calm."""
    mild, harsh = KNOBS[knob]
    memory = "" if "qsgd" in mild or "ternary" in mild else " + error_feedback()"
    recipe = Recipe.of(f"{mild}{memory} + accordion({mild}, {harsh}, 1, interval=1)")
    state = dict[str, object]()
    for step, size in enumerate((1.0, 0.1, 0.09), start=1):
        block = Bucket.of({"calm": _ones(1.0), "wild": _ones(size if step < 3 else 5.0)})
        recipe = recipe.controller.decide(Facts(step, 0.1, [block]), recipe, state)  # pyright: ignore
    assert {name: repr(e) for name, e in recipe.routes.items()} == {
        "calm": repr(Recipe.of(f"{harsh}{memory}").exchange)
    }
    assert isinstance(recipe.exchange, Part)
    assert "route(" in repr(recipe)
    assert Recipe.of(repr(recipe)) == recipe


def _ones(size: float) -> torch.Tensor:
    return torch.full((6, 5), size)
