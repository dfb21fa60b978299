"""Ridge-logistic regression on unequal data, in double precision, with its exact optimum."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import softshrink

from gossamer.core.bucket import Layout
from gossamer.core.contracts import Codec
from gossamer.core.parts import parse
from gossamer.simulate import Replica, replicas, train

DIMENSIONS, SAMPLES = 40, 12
TERNARY = f"qsgd(bits=2, bucket={DIMENSIONS})"  # one level of the largest element


class Point(nn.Module):
    """A vector of parameters at the origin."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(DIMENSIONS, dtype=torch.float64))


@dataclass(frozen=True)
class Problem:
    """mean_i f_i + l1 |x|_1, f_i of worker i: logistic loss on its samples + ridge / 2 |x|^2, its smoothness kappa * ridge."""

    kappa: float = 98.0
    ridge: float = 0.1
    l1: float = 0.0
    workers: int = 10

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Features (workers x samples x dimensions) and labels of +1 and -1; every worker has a taste of its own."""
        rng = torch.Generator().manual_seed(11)
        a = torch.randn(self.workers, SAMPLES, DIMENSIONS, generator=rng, dtype=torch.float64)
        taste = torch.randn(self.workers, DIMENSIONS, 1, generator=rng, dtype=torch.float64)
        steepest = max(float(torch.linalg.matrix_norm(m, 2)) ** 2 / (4 * SAMPLES) for m in a)
        return a * ((self.kappa - 1) * self.ridge / steepest) ** 0.5, torch.sign((a @ taste).squeeze(-1))

    def slope(self, x: Tensor, worker: int) -> Tensor:
        a, y = self.data[0][worker], self.data[1][worker]
        return -(torch.sigmoid(-y * (a @ x)) * y) @ a / SAMPLES + self.ridge * x

    def slopes(self, x: Tensor) -> Tensor:
        """The smooth part's gradient, over all workers."""
        a, y = self.data[0].reshape(-1, DIMENSIONS), self.data[1].reshape(-1)
        return -(torch.sigmoid(-y * (a @ x)) * y) @ a / len(y) + self.ridge * x

    @cached_property
    def optimum(self) -> Tensor:
        x, step = torch.zeros(DIMENSIONS, dtype=torch.float64), 1 / (self.kappa * self.ridge)
        for _ in range(10_000):
            before, x = x, softshrink(x - step * self.slopes(x), step * self.l1)
            if torch.equal(before, x):  # nor will it move again
                break
        return x

    def rates(self, omega: float) -> tuple[float, float]:
        """DIANA's alpha and step size for a quantiser of this relative variance."""
        follows, smooth = 1 / (1 + omega), self.kappa * self.ridge
        alpha, c = follows / 2, 4 * (1 - follows) / (self.workers * follows**2)
        return alpha, min(alpha / self.ridge, 2 / ((smooth + self.ridge) * (1 + c * alpha)))

    def ranks(self, recipe: str, rate: float) -> list[Replica]:
        return replicas(recipe, Point, lambda m: torch.optim.SGD(m.parameters(), lr=rate), self.workers, seed=5)

    def train(self, ranks: list[Replica], steps: int) -> float:
        """Full gradients; the squared distance to the optimum afterwards."""

        def backward(model: nn.Module, rank: int, step: int) -> float:
            assert isinstance(model, Point)
            model.x.grad = self.slope(model.x.detach(), rank)
            return 0.0

        train(ranks, backward, steps)
        return float((ranks[0].flat() - self.optimum).square().sum())


def tuned(problem: Problem, codec: str) -> tuple[float, float]:
    """DIANA's alpha and step size for a codec, given as text."""
    quantiser = parse(codec)
    assert isinstance(quantiser, Codec)
    return problem.rates(quantiser.omega(Layout.of({"x": (DIMENSIONS,)})))
