"""Full gradients in float64 on a convex workload whose optimum is known: here an error is the method's own."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gossamer.bench.workloads import Ridge, get
from gossamer.simulate import Replica, replicas, train

RANKS = 8  # as many as the workload has sources
ROWS = 256  # all of a rank's rows


class Problem(NamedTuple):
    """Ridge regression whose ranks have data of their own, with the constants of its theory."""

    workload: Ridge
    smooth: float  # of the least smooth f_i
    convex: float  # of the least convex f_i


def ridge(seed: int) -> Problem:
    """The problem of a seed: another model, other data.

    >>> problem = ridge(0)
    >>> problem.smooth > problem.convex > 0
    True
    """
    made = get("ridge", seed=seed, shards="source", batch_size=ROWS)
    assert isinstance(made, Ridge)
    ends = [torch.linalg.eigvalsh(_curvature(made, rank)) for rank in range(RANKS)]
    return Problem(made, max(float(e[-1]) for e in ends), min(float(e[0]) for e in ends))


def _curvature(made: Ridge, rank: int) -> Tensor:
    inputs = made.batch(0, rank, RANKS)[0]
    return inputs.T @ inputs / len(inputs) + 1e-2 * torch.eye(inputs.shape[1], dtype=torch.float64)


def crew(problem: Problem, recipe: str, lr: float) -> list[Replica]:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=lr)

    return replicas(recipe, problem.workload.model, sgd, RANKS, problem.workload.seed)


def distances(
    problem: Problem,
    ranks: list[Replica],
    steps: int,
    every: int,
    optimum: Tensor | None = None,
    rate: Callable[[int], float] | None = None,
) -> tuple[list[float], list[float], list[float]]:
    """Steps, squared distances to the optimum and bytes of a rank so far; ends where the distance is no number.

    `rate` is the learning rate of a step, where it changes.
    """
    goal = problem.workload.optimum if optimum is None else optimum

    def backward(model: nn.Module, rank: int, step: int) -> float:
        if rate is not None:
            ranks[rank].optimizer.param_groups[0]["lr"] = rate(step)
        loss = problem.workload.loss(model, problem.workload.batch(0, rank, RANKS))
        loss.backward()
        return float(loss.detach())

    at, apart, sent = [0.0], [_distance(ranks, goal)], [0.0]
    while at[-1] < steps and math.isfinite(apart[-1]) and apart[-1] < 1e12:
        run = train(ranks, backward, every)
        at.append(at[-1] + every)
        apart.append(_distance(ranks, goal))
        sent.append(sent[-1] + run.ledger.sent / RANKS)
    return at, apart, sent


def _distance(ranks: list[Replica], goal: Tensor) -> float:
    return float((ranks[0].flat().double() - goal).square().sum())


def slope(steps: list[float], logs: list[float]) -> float:
    """Least squares."""
    x, y = torch.tensor(steps, dtype=torch.float64), torch.tensor(logs, dtype=torch.float64)
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def sparse_optimum(problem: Problem, l1: float) -> Tensor:
    """The optimum of f + l1 |x|_1: proximal steps until nothing moves."""
    inputs, answers = problem.workload.data.train
    curve = inputs.T @ inputs / len(inputs) + 1e-2 * torch.eye(inputs.shape[1], dtype=torch.float64)
    pull, lr = inputs.T @ answers / len(inputs), 1 / float(torch.linalg.eigvalsh(curve)[-1])
    x = torch.zeros_like(pull)
    for _ in range(5000):
        x = x - lr * (curve @ x - pull)
        x = x.sign() * (x.abs() - lr * l1).clamp(min=0)
    return x
