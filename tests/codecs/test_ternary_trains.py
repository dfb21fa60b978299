"""Gradients whose elements share a mean train under TernGrad: as presets, over ranks and many steps."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from gossamer.simulate import replicas, train


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 64))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@cache  # for those who only read them: all recipes are given them, and so is the mean of them all
def near_one(rank: int, step: int) -> Tensor:
    rng = torch.Generator().manual_seed(1000 * step + rank)
    return 1 + 0.01 * torch.rand(64, 64, generator=rng)


@pytest.mark.parametrize("recipe", ["terngrad", "allreduce(ternary())", "gather(ternary())"])
def test_gradients_between_1_and_1_01_average_to_themselves(recipe: str) -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        model.get_parameter("w").grad = near_one(rank, step).clone()
        return 0.0

    crew, steps = replicas(recipe, Layer, sgd, 4), 200
    train(crew, backward, steps)
    mean = -crew[0].flat() / steps
    true = torch.stack([near_one(r, s) for r in range(4) for s in range(1, steps + 1)]).mean(0).flatten()
    # Each element's noise is at most that of a coin over [0, 1.01] whose chance of 0 is .01; z < 6 for 4096 elements.
    assert float((mean - true).abs().max()) < 6 * 1.01 * (2 * 0.01 / steps) ** 0.5
    assert float(mean.mean()) == pytest.approx(float(true.mean()), rel=1e-3)


@cache  # the dense one is asked for by all
def loss(recipe: str) -> float:
    """Of a linear layer whose targets are all near 10: every gradient of the bias has one sign, and elements share a mean."""
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(256, 16, generator=rng)
    y = x @ torch.randn(16, 8, generator=rng) * 0.1 + 10

    def linear() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Linear(16, 8)

    def backward(model: nn.Module, rank: int, step: int) -> float:
        rows = slice(64 * rank, 64 * rank + 64)
        loss = (model(x[rows]) - y[rows]).square().mean()
        loss.backward()
        return float(loss.detach())

    crew = replicas(recipe, linear, lambda m: torch.optim.SGD(m.parameters(), lr=0.4), 4)
    train(crew, backward, 250)
    return float((crew[0].model(x) - y).square().mean().detach())


@pytest.mark.parametrize("recipe", ["terngrad", "terngrad(levels=3)", "allreduce(ternary())"])
def test_a_linear_layer_with_offset_targets_learns_as_it_does_dense(recipe: str) -> None:
    assert loss("allreduce") < 1e-4
    assert loss(recipe) < 1e-4
