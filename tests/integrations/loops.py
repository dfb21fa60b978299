"""A small awkward model, its data, and training loops as users write them, for gangs and for the simulator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from gossamer.core.schedule import TrainsElsewhere
from gossamer.integrations import Communicator
from gossamer.recipe import Recipe
from gossamer.simulate import replicas, train

SMALL = " + bucket(0.00004)"  # three channels on the awkward model
SEED = 3
DEADLINE = 20.0


class Awkward(nn.Module):
    """Odd sizes, a transposed parameter, an empty one, one whose gradient is always zero, and a scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=rng, dtype=torch.float64) / 3).to(dtype)

        self.matrix = nn.Parameter(drawn(17, 11))
        self.turned = nn.Parameter(drawn(11, 7).t())
        self.empty = nn.Parameter(drawn(0, 3))
        self.still = nn.Parameter(drawn(5))
        self.bias = nn.Parameter(drawn(7))
        self.scale = nn.Parameter(drawn())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.matrix)
        out = nn.functional.linear(hidden, self.turned, self.bias) * (1 + self.scale)
        return out + 0 * self.still.sum() + self.empty.sum()


class OwnWay(nn.Module):
    """Each rank uses a layer of its own, so that no optimizer has a state of the other one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.ways, self.rank = nn.ModuleList(nn.Linear(17, 7) for _ in range(2)), rank

    def forward(self, x: Tensor) -> Tensor:
        return self.ways[self.rank](x)


def data(rank: int, step: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """What a rank trains on at a step."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(rows, 17, generator=rng, dtype=torch.float64)
    return x.to(dtype), (torch.randn(rows, 7, generator=rng, dtype=torch.float64) + rank).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = data(rank, step, dtype=next(model.parameters()).dtype)
    return (model(x) - y).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def usual(recipe: str | Recipe) -> Optimizers:
    """SGD with momentum; without, where the recipe brings its own."""
    parsed = Recipe.of(recipe)
    update = parsed.update
    own = isinstance(parsed.schedule, TrainsElsewhere) or any("adds momentum" in part.traits for part in parsed.parts())
    own |= update is not None and (update.sends_momentum or update.is_step or "fades" in parsed.memory.traits)
    return (lambda model: torch.optim.SGD(model.parameters(), lr=0.05)) if own else sgd


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def same(a: Tensor, b: Tensor) -> bool:
    """Every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bytes(a.numpy().data) == bytes(b.numpy().data)


def small_step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, rank: int) -> None:
    """One optimizer step of an ordinary loop."""
    optimizer.zero_grad()
    step, last = comm.step + 1, False
    while not last:
        with comm.accumulating() as last:
            (loss_of(model, rank, step) / comm.accumulate).backward()
    optimizer.step()


@contextmanager
def attached(
    recipe: str | Recipe,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **options: Any,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Communicator]]:
    """A model, its optimizer and its communicator, which is detached in the end."""
    mine = Awkward() if model is None else model
    made = (optimizer or usual(recipe))(mine)
    with gossamer.attach(mine, made, recipe, **{"seed": SEED, "deadline": DEADLINE} | options) as comm:
        yield mine, made, comm


def trained(rank: int, size: int, recipe: str | Recipe, steps: int) -> list[Tensor]:
    """The parameters after each step, on real processes."""
    out = list[Tensor]()
    with attached(recipe) as (model, optimizer, comm):
        while comm.step < steps:
            small_step(model, optimizer, comm, rank)
            comm.check_sync()
            out.append(flat(model))
    return out


def simulated(recipe: str | Recipe, size: int, steps: int) -> list[list[Tensor]]:
    """The same on the simulator: for each rank, the parameters after each step."""

    def backward(model: nn.Module, rank: int, step: int) -> float:
        loss = loss_of(model, rank, step)
        loss.backward()
        return float(loss.detach())

    ranks = replicas(recipe, Awkward, usual(recipe), size, seed=SEED)
    out: list[list[Tensor]] = [[] for _ in ranks]
    for _ in range(steps):
        train(ranks, backward, 1)
        for replica, seen in zip(ranks, out, strict=True):
            seen.append(replica.flat().clone())
    return out


def learning(rank: int, size: int, recipe: str, optimizer: Optimizers | None = None) -> list[float]:
    """A rank's losses on what it sees again and again, of ranks that go at their own pace and meet in the end.

    So many steps that it has long learned it: what another learned while this rank was held up lands all at once, and for
    some steps it is worse again.
    """
    with attached(recipe, optimizer=optimizer) as (model, made, comm):
        losses = list[float]()
        for _ in range(160):
            made.zero_grad()
            loss = loss_of(model, rank, 1)
            loss.backward()
            made.step()
            losses.append(loss.item())
        comm.finish()
        return losses
