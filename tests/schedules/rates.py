"""Quadratic objectives in double precision, under a learning rate that a schedule moves."""

import math
from collections.abc import Callable

import torch
from tests.runtime.gym import Flat, Replica, make, noise, train
from torch import Tensor

NUMEL = 5
Rate = Callable[[int], float]


def constant(step: int) -> float:
    return 0.1


def cosine(step: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * step / 40)) + 1e-3


def steps_down(step: int) -> float:
    return 0.2 if step < 7 else 0.02


def centre(rank: int) -> Tensor:
    return noise(9, rank, numel=NUMEL, dtype=torch.float64)


def gradient(x: Tensor, rank: int, step: int) -> Tensor:
    """Of 1/2 |A (x - centre)|^2 with an A that differs by coordinate, and noise."""
    curvature = torch.linspace(0.2, 1.5, NUMEL, dtype=torch.float64)
    return curvature * (x - centre(rank)) + 0.1 * noise(rank, step, numel=NUMEL, dtype=torch.float64)


def scheduled(rate: Rate, pull: Callable[[Tensor, int, int], Tensor] = gradient):
    """A backward that also does what a scheduler does: it sets the rate of the step that is computed."""

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = pull(x.detach(), rank, step)
        for group in model.optimizer.param_groups:  # pyright: ignore
            group["lr"] = rate(step)
        return 0.0

    return backward


def known_sgd(momentum: float = 0.0, **options) -> Callable[[torch.nn.Module], torch.optim.Optimizer]:
    def build(model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, **options)
        object.__setattr__(model, "optimizer", optimizer)
        return optimizer

    return build


def trained(recipe: str, size: int, steps: int, rate: Rate = constant, momentum: float = 0.0) -> list[Replica]:
    ranks = make(recipe, size, lambda: Flat(NUMEL), known_sgd(momentum))
    train(ranks, scheduled(rate), steps)
    return ranks


def model(rank: Replica) -> Tensor:
    return rank.flat().clone()
