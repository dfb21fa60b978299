"""Checkpoints as gossamer wrote them in format 2, and how training went on: for those that are read now.

python -m tests.runtime.format2      in a checkout of commit 32926f1, which wrote tests/golden/checkpoints/format2.pt
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.runtime.gym import Replica, make, on_all, parameters, pull, train
from torch import nn

from gossamer.runtime import Worker, checkpoint

FILE = Path(__file__).parents[1] / "golden" / "checkpoints" / "format2.pt"
SIZE, BEFORE, AFTER = 3, 4, 3
RECIPES = (
    "gather(topk(ratio=0.2)) + error_feedback(decay=0.9)",
    "gather(topk(ratio=0.2)) + error_feedback(units='update')",
    "gather(qsgd(bits=4, bucket=16)) + diana(momentum=0.5)",
    "scatter(topk(ratio=0.2)) + error_feedback()",
    "scatter(topk(ratio=0.2)) + error_feedback(units='update')",
    "scatter(qsgd(bits=2, bucket=16)) + diana()",
    "scatter(topk(ratio=0.2)) + none(allow_biased=True)",
    "allreduce(powersgd(rank=1)) + error_feedback()",
    "gather(topk(ratio=0.2)) + error_feedback() + overlap_local_sgd(3)",
)


class Small(nn.Module):
    """A matrix whose chunks had edges within rows, in a world of three."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(2)
        self.matrix = nn.Parameter(torch.randn(30, 6, generator=rng))
        self.bias = nn.Parameter(torch.randn(4, generator=rng))


def ranks_of(recipe: str) -> list[Replica]:
    return make(recipe, SIZE, Small, lambda model: torch.optim.SGD(model.parameters(), lr=0.05))


def go_on(ranks: Sequence[Replica]) -> None:
    """Some steps, under another loss scale and another learning rate."""
    for r in ranks:
        r.worker.scale /= 2
        r.optimizer.param_groups[0]["lr"] = 0.03
    train(ranks, pull, AFTER)


def written(recipe: str) -> dict[str, Any]:
    ranks = ranks_of(recipe)
    for r in ranks:
        r.worker.scale = 1024.0
    train(ranks, pull, BEFORE)
    on_all(ranks, Worker.quiesce)
    kept = {"models": parameters(ranks), "comms": [checkpoint.save(r.worker) for r in ranks]}
    go_on(ranks)
    return kept | {"later": parameters(ranks)}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    torch.save({recipe: written(recipe) for recipe in RECIPES}, FILE)
