"""Texts of before: mixers and backup workers were exchanges once."""

import io
import warnings

import pytest
import torch
from tests.runtime.gym import make, parameters, pull, resumed, saved, train

from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe
from gossamer.runtime.manifest import seal

BEFORE = {
    "push_sum() + gossip()": "sgp",
    "push_sum(topology=ring()) + gossip(every=2, overlap=True)": "sgp(topology=ring(), every=2, overlap=True)",
    "backup_workers()": "backup",
    "backup_workers(backups=2)": "backup(2)",
    "first(over=scatter(qsgd()))": "scatter(qsgd()) + backup_workers()",
    "backup_workers(backups=2, over=scatter(ternary(), feedback=1.0))": "scatter(ternary(), feedback=1.0) + backup_workers(backups=2)",
}


@pytest.mark.parametrize("text", BEFORE)
def test_it_is_read_as_what_it_is_now_and_the_new_text_is_named(text: str) -> None:
    new = Recipe.of(BEFORE[text])
    with pytest.warns(FutureWarning, match="is written") as told:
        assert Recipe.of(text) == new
    assert repr(repr(new)) in str(told[0].message)
    assert Recipe.of(repr(new)) == new  # without a word: warnings are errors here


@pytest.mark.parametrize("text", ["push_sum() + gossip() + error_feedback()", "backup_workers() + diana()"])
def test_what_was_refused_is_refused(text: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # pytest puts the filters back
    with pytest.raises(RecipeError, match="drop the memory"):
        Recipe.of(text)


def test_a_checkpoint_of_then_goes_on_without_a_word() -> None:
    ranks = make("sgp(every=2)", 3)
    train(ranks, pull, 5)
    files = list[bytes]()
    for file in saved(ranks):
        content = torch.load(io.BytesIO(file), weights_only=True)
        comm = content["comm"]
        then = "push_sum() + gossip(every=2)"
        comm |= dict.fromkeys(("recipe", "adopted", "due"), then)
        rank = next(int(k[4:].partition("/")[0]) for k in comm if k.startswith("rank"))
        comm.pop(f"rank{rank}/contents")
        seal(comm, rank)
        out = io.BytesIO()
        torch.save(content, out)
        files.append(out.getvalue())
    again = resumed("sgp(every=2)", files)
    for each in (ranks, again):
        train(each, pull, 3)
    assert all(torch.equal(a, b) for a, b in zip(parameters(ranks), parameters(again), strict=True))
