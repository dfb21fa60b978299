"""Two convex problems in float64 whose optimum is known: here a method's error is its own, and not the model's."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from gossamer.bench.workloads import quality
from gossamer.bench.workloads.contract import Workload, workload
from gossamer.bench.workloads.shards import Batch, Data

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


@dataclass(frozen=True, kw_only=True)
class Convex(Workload):
    """A linear model and a penalty. Judged on the training objective itself: there is nothing to generalise to."""

    metric: ClassVar[str] = "excess loss over the optimum"
    lower_is_better: ClassVar[bool] = True
    group: ClassVar[str] = "source"

    batch_size: int = 32
    spread: float = 1.0  # how much the sources differ; 0: not at all

    @abstractmethod
    def targets(self, answers: Tensor, noise: Tensor) -> Tensor:
        """What the model has to say of each row."""

    @abstractmethod
    def solved(self) -> Tensor:
        """The best weights."""

    @abstractmethod
    def misfit(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss without the penalty."""

    @cached_property
    def optimum(self) -> Tensor:
        return self.solved()

    def load(self) -> Data:
        inputs, answers, noise, source = _draw(self.seed, self.spread)
        rows = (inputs, self.targets(answers, noise))
        return Data(rows, rows, source)

    def network(self) -> nn.Module:
        return nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        penalty = PENALTY / 2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return self.misfit(model(inputs).squeeze(-1), targets) + penalty

    def evaluate(self, model: nn.Module) -> float:
        with quality.judging(model):
            best = nn.Linear(WIDTH, 1, bias=False, dtype=torch.float64)
            best.weight.copy_(self.optimum)
            return float(self.loss(model, self.data.held) - self.loss(best, self.data.held))


@final
@workload("ridge")
class Ridge(Convex):
    """Least squares with a penalty."""

    summary: ClassVar[str] = "ridge regression, 32 parameters, known optimum, no download"

    def targets(self, answers: Tensor, noise: Tensor) -> Tensor:
        return answers + 0.1 * noise

    def solved(self) -> Tensor:
        """In closed form."""
        inputs, answers = self.data.train
        return torch.linalg.solve(inputs.T @ inputs / ROWS + PENALTY * _identity(), inputs.T @ answers / ROWS)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02)

    def misfit(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() / 2


@final
@workload("logistic")
class Logistic(Convex):
    """Two classes and a penalty."""

    summary: ClassVar[str] = "logistic regression, 32 parameters, known optimum, no download"

    def targets(self, answers: Tensor, noise: Tensor) -> Tensor:
        return (answers + noise > 0).double()

    def solved(self) -> Tensor:
        """By Newton's method: it stops gaining digits after about eight steps."""
        inputs, classes = self.data.train
        weights = torch.zeros(WIDTH, dtype=torch.float64)
        for _ in range(20):
            chance = torch.sigmoid(inputs @ weights)
            slope = inputs.T @ (chance - classes) / ROWS + PENALTY * weights
            curve = (inputs.T * (chance * (1 - chance))) @ inputs / ROWS + PENALTY * _identity()
            weights = weights - torch.linalg.solve(curve, slope)
        return weights

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def misfit(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def _identity() -> Tensor:
    return torch.eye(WIDTH, dtype=torch.float64)
