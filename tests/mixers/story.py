"""Ranks that disagree, and pull apart: what mixers are tried on."""

import torch
from tests.runtime.gym import Flat, Replica, make, noise, sgd
from torch import Tensor

from gossamer.recipe import Recipe

NUMEL = 6


def scattered(size: int) -> Tensor:
    return torch.stack([noise(3, rank, numel=NUMEL, dtype=torch.float64) for rank in range(size)])


def disagreeing(recipe: "str | Recipe", size: int, lr: float = 0.0, momentum: float = 0.0) -> list[Replica]:
    """Replicas with different parameters."""
    ranks = make(recipe, size, lambda: Flat(NUMEL), sgd(lr, momentum))
    for r, start in zip(ranks, scattered(size)):
        r.model.get_parameter("x").data.copy_(start)
    return ranks


def still(model: torch.nn.Module, rank: int, step: int) -> float:
    return 0.0


def spread(models: list[Tensor]) -> float:
    return float((torch.stack(models) - torch.stack(models).mean(0)).abs().max())


def targets(model: torch.nn.Module, rank: int, step: int) -> float:
    """Gradients of 1/2 |z - b_rank|^2."""
    x = model.get_parameter("x")
    x.grad = x.detach() - noise(8, rank, numel=NUMEL, dtype=torch.float64).to(x)
    return 0.0


def quadratics(size: int) -> Tensor:
    """What each rank is pulled towards."""
    return torch.stack([noise(8, rank, numel=NUMEL, dtype=torch.float64) for rank in range(size)])
