"""Two convex problems in float64 whose optimum is known: here a method's error is its own, and not the model's."""

from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from gossamer.workloads import quality
from gossamer.workloads.contract import Workload, workload
from gossamer.workloads.shards import Batch, Data

ROWS, WIDTH, SOURCES = 2048, 32, 8
PENALTY = 1e-2  # of half the squared weights


def _draw(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs, noiseless answers, noise, and which of 8 sources each row is from.

    All sources share a true model, plus `spread` times one of their own, and see inputs around a centre of their own.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    source = torch.arange(ROWS) % SOURCES
    truth = (normal(WIDTH) + spread * normal(SOURCES, WIDTH)) / WIDTH**0.5
    inputs = normal(ROWS, WIDTH) + spread * normal(SOURCES, WIDTH)[source] / 2
    return inputs, (inputs * truth[source]).sum(1), normal(ROWS), source


@final
@workload("ridge")
class Ridge(Workload):
    """Least squares with a penalty. Judged on the training objective itself: there is nothing to generalise to."""

    summary: ClassVar[str] = "ridge regression, 32 parameters, known optimum, no download"
    metric: ClassVar[str] = "excess loss over the optimum"
    lower_is_better: ClassVar[bool] = True
    group: ClassVar[str] = "source"

    batch_size: int = 32
    spread: float = 1.0  # how much the sources differ; 0: not at all

    def load(self) -> Data:
        inputs, answers, noise, source = _draw(self.seed, self.spread)
        rows = (inputs, answers + 0.1 * noise)
        return Data(rows, rows, source)

    @cached_property
    def optimum(self) -> Tensor:
        """The best weights, in closed form."""
        inputs, answers = self.data.train
        return torch.linalg.solve(inputs.T @ inputs / ROWS + PENALTY * _identity(), inputs.T @ answers / ROWS)

    def network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, answers = batch
        return (model(inputs).squeeze(-1) - answers).square().mean() / 2 + _penalty(model)

    def evaluate(self, model: nn.Module) -> float:
        with quality.judging(model):
            return float(self.loss(model, self.data.held) - self.loss(_linear(self.optimum), self.data.held))


@final
@workload("logistic")
class Logistic(Workload):
    """Two classes and a penalty. Judged on the training objective itself: there is nothing to generalise to."""

    summary: ClassVar[str] = "logistic regression, 32 parameters, known optimum, no download"
    metric: ClassVar[str] = "excess loss over the optimum"
    lower_is_better: ClassVar[bool] = True
    group: ClassVar[str] = "source"

    batch_size: int = 32
    spread: float = 1.0  # how much the sources differ; 0: not at all

    def load(self) -> Data:
        inputs, answers, noise, source = _draw(self.seed, self.spread)
        rows = (inputs, (answers + noise > 0).double())
        return Data(rows, rows, source)

    @cached_property
    def optimum(self) -> Tensor:
        """The best weights, by Newton's method: it stops gaining digits after about eight steps."""
        inputs, classes = self.data.train
        weights = torch.zeros(WIDTH, dtype=torch.float64)
        for _ in range(20):
            chance = torch.sigmoid(inputs @ weights)
            slope = inputs.T @ (chance - classes) / ROWS + PENALTY * weights
            curve = (inputs.T * (chance * (1 - chance))) @ inputs / ROWS + PENALTY * _identity()
            weights = weights - torch.linalg.solve(curve, slope)
        return weights

    def network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, classes = batch
        scores = model(inputs).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(scores, classes) + _penalty(model)

    def evaluate(self, model: nn.Module) -> float:
        with quality.judging(model):
            return float(self.loss(model, self.data.held) - self.loss(_linear(self.optimum), self.data.held))


def _identity() -> Tensor:
    return torch.eye(WIDTH, dtype=torch.float64)


def _penalty(model: nn.Module) -> Tensor:
    return PENALTY / 2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


def _linear(weights: Tensor) -> nn.Module:
    model = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(weights)
    return model
