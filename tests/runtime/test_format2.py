"""Checkpoints that an earlier gossamer wrote go on here, and nothing that was owed is lost."""

from typing import Any

import pytest
import torch
from tests.runtime.format2 import FILE, RECIPES, go_on, ranks_of
from tests.runtime.gym import Replica, by_name, parameters

from gossamer.core.bucket import Bucket
from gossamer.core.errors import CheckpointError
from gossamer.runtime import checkpoint

KEPT: dict[str, Any] = torch.load(FILE, weights_only=True)
SCATTERED = [r for r in RECIPES if "scatter" in r]


def loaded(recipe: str, everybody: bool = False) -> list[Replica]:
    ranks = ranks_of(recipe)
    for r, model, comm in zip(ranks, KEPT[recipe]["models"], KEPT[recipe]["comms"], strict=True):
        torch.nn.utils.vector_to_parameters(model, r.model.parameters())
        r.worker.scale = 1024.0
        checkpoint.load(r.worker, KEPT[recipe]["comms"] if everybody else comm)
    return ranks


def owed_in_all(recipe: str, name: str) -> torch.Tensor:
    """What the ranks that wrote the file owe to the mean: owners, and memories."""
    comms = KEPT[recipe]["comms"]
    total = sum(c[f"rank{i}/exchange/owed/{name}"].double() for i, c in enumerate(comms))
    return total + kept_in(comms, "residual", name, 1) + kept_in(comms, "own", name, -1)


def kept_in(comms: list[dict[str, Any]], word: str, name: str, sign: int) -> "torch.Tensor | float":
    mine = [
        c[f"rank{i}/memory/{word}/{name}"].double() for i, c in enumerate(comms) if f"rank{i}/memory/{word}/{name}" in c
    ]
    return sign * torch.stack(mine).mean(0) if mine else 0.0


def owed_by(ranks: list[Replica], name: str) -> torch.Tensor:
    def entries(role: str, key: str) -> list[torch.Tensor]:
        found = (by_name(r.worker.buckets, role, key) for r in ranks)
        return [f[name].double() for f in found if f]

    total = torch.stack(entries("exchange", "owed")).sum(0)
    for word, sign in ("residual", 1), ("own", -1):
        if mine := entries("memory", word):
            total = total + sign * torch.stack(mine).mean(0)
    return total


@pytest.mark.parametrize("recipe", [r for r in RECIPES if "scatter" not in r])
def test_training_goes_on_as_it_did(recipe: str) -> None:
    ranks = loaded(recipe)
    go_on(ranks)
    for now, then in zip(parameters(ranks), KEPT[recipe]["later"], strict=True):
        torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("recipe", "everybody"), [(r, e) for r in SCATTERED for e in (False, True) if e or "none" not in r]
)
def test_where_edges_of_chunks_have_moved_all_that_is_owed_is_still_owed(recipe: str, everybody: bool) -> None:
    ranks = loaded(recipe, everybody)
    for name in ("matrix", "bias"):
        torch.testing.assert_close(owed_by(ranks, name), owed_in_all(recipe, name), rtol=1e-6, atol=1e-3)
    for i, r in enumerate(ranks):
        c = r.worker.buckets[0]
        chunks = Bucket(c.states["exchange"]["owed"], c.layout).chunks(len(ranks))
        assert not any(chunk.flat.any() for j, chunk in enumerate(chunks) if j != i)
    go_on(ranks)


def test_what_no_memory_can_take_over_needs_the_dictionaries_of_all_ranks() -> None:
    with pytest.raises(CheckpointError, match=r"rank \d owes elements that another rank owns here.*of all ranks"):
        loaded("scatter(topk(ratio=0.2)) + none(allow_biased=True)")
