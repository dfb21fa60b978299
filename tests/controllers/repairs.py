"""A setting in which PowerSGD of rank 1 loses, and Accordion does not: `python -m tests.controllers.repairs` shows the curves.

A matrix learns a teacher whose directions matter alike, from noisy samples: while it learns, the gradient has many directions,
and a rank of 1 passes few of them; once it is there, gradients are noise whose size stays, and any rank will do.
"""

from typing import NamedTuple

import torch
from torch import nn

from gossamer.simulate import replicas, train

WIDE, RANKS, BATCH, EPOCH, EPOCHS, RATE = 32, 4, 64, 10, 16, 0.1
RECIPES = {
    "dense": "allreduce",
    "rank 8": "allreduce(powersgd(rank=8, min_ratio=1.0)) + error_feedback()",
    "rank 1": "allreduce(powersgd(rank=1, min_ratio=1.0)) + error_feedback()",
    "accordion": "allreduce(powersgd(rank=8, min_ratio=1.0)) + error_feedback() + accordion("
    f"allreduce(powersgd(rank=8, min_ratio=1.0)), allreduce(powersgd(rank=1, min_ratio=1.0)), {EPOCH}, interval=2)",
}


class Curve(NamedTuple):
    """The squared distance to the teacher after every epoch, and what a rank sent in it."""

    distances: list[float]
    sent: list[int]
    decided: list[str]  # what was put in force, as the ledger tells it


def curve(recipe: str) -> Curve:
    rng = torch.Generator().manual_seed(1)
    teacher = torch.linalg.qr(torch.randn(WIDE, WIDE, generator=rng))[0]

    def student() -> nn.Module:
        model = nn.Linear(WIDE, WIDE, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def backward(model: nn.Module, rank: int, step: int) -> float:
        noise = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(BATCH, WIDE, generator=noise)
        y = x @ teacher.t() + 0.3 * torch.randn(BATCH, WIDE, generator=noise)
        loss = (model(x) - y).square().sum(1).mean() / 2
        loss.backward()
        return float(loss.detach())

    ranks = replicas(recipe, student, lambda m: torch.optim.SGD(m.parameters(), lr=RATE), RANKS)
    distances, sent, decided = list[float](), list[int](), list[str]()
    for _ in range(EPOCHS):
        run = train(ranks, backward, EPOCH)
        weight = next(ranks[0].model.parameters()).detach()
        distances.append(float((weight - teacher).square().sum()))
        sent.append(run.ledger.sent // RANKS)
        decided += [f"step {d.step}: {d.decision}" for d in run.ledger.decisions if d.rank == 0]
    return Curve(distances, sent, decided)


def show() -> None:
    curves = {name: curve(recipe) for name, recipe in RECIPES.items()}
    print("epoch" + "".join(f"{name:>12}" for name in curves))
    for epoch in range(EPOCHS):
        print(f"{epoch:5}" + "".join(f"{c.distances[epoch]:12.4f}" for c in curves.values()))
    print(*curves["accordion"].decided, sep="\n")
    print("bytes" + "".join(f"{sum(c.sent):12,}" for c in curves.values()))


if __name__ == "__main__":
    show()
