"""Virtual ranks, all with the same parameters. Those whose models stay equal may share one body: one model, and one optimizer
that steps once for all of them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gossamer.core.bucket import Layout
from gossamer.recipe import Recipe
from gossamer.runtime import Worker, params_of


class StepTurns:
    """Who steps the optimizer of a body that so many ranks share: the first of them that comes to the step."""

    def __init__(self, ranks: int = 1) -> None:
        self._ranks, self._asked = ranks, 0

    def take(self) -> bool:
        """True if this rank steps; each rank asks once a step, and none a second time before all have asked."""
        self._asked += 1
        return self._asked % self._ranks == 1 % self._ranks


@dataclass
class Replica:
    """One virtual rank: its model, optimizer, worker and recorded results."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    worker: Worker
    losses: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list[int])  # that the losses are of: one that is late may leave out some
    begins: list[float] = field(default_factory=list[float])  # of its steps, on the virtual clock
    clock: float = 0.0
    turns: StepTurns = field(default_factory=StepTurns)  # who steps the optimizer, if ranks share it

    def flat(self) -> Tensor:
        """All parameters as one flat tensor."""
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def mean_losses(ranks: Iterable[Replica]) -> list[float]:
    """Of each step, the mean loss of the ranks that made it."""
    found = defaultdict[int, list[float]](list)
    for rank in ranks:
        for step, loss in zip(rank.steps, rank.losses, strict=True):
            found[step].append(loss)
    return [sum(each) / len(each) for _, each in sorted(found.items())]


class ReplicaMaker:
    """Makes the ranks of a world of `size`, with the parameters of the first model that `model` makes."""

    def __init__(
        self,
        recipe: "str | Recipe",
        model: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        size: int,
        seed: int,
    ) -> None:
        self.recipe, self.first = Recipe.of(recipe), model()
        self._model, self._optimizer, self._size, self._seed = model, optimizer, size, seed
        self._layouts = list[Layout]()

    def of_its_own(self, rank: int) -> Replica:
        """A rank with a model and an optimizer of its own."""
        model = self._model()
        model.load_state_dict(self.first.state_dict())
        return self._around(rank, model, self._optimizer(model), StepTurns())

    def of_one_body(self) -> list[Replica]:
        """All ranks, around the first model."""
        for _ in range(self._size):  # as `of_its_own` does, which leaves torch's generator as it is here
            self._model()
        optimizer, turns = self._optimizer(self.first), StepTurns(self._size)
        return [self._around(rank, self.first, optimizer, turns) for rank in range(self._size)]

    def _around(self, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, turns: StepTurns) -> Replica:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        worker = Worker(self.recipe, params_of(named), optimizer, rank, self._size, self._seed)
        self._layouts = self._layouts or [bucket.layout for bucket in worker.buckets]
        for bucket, layout in zip(worker.buckets, self._layouts, strict=True):
            bucket.layout = layout  # with its chunks, of which each of N ranks would keep N
        return Replica(model, optimizer, worker, turns=turns)


def replicas(
    recipe: "str | Recipe",
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    size: int,
    seed: int = 0,
) -> list[Replica]:
    """Make virtual ranks that start from the same parameters."""
    maker = ReplicaMaker(recipe, model, optimizer, size, seed)
    return [maker.of_its_own(rank) for rank in range(size)]


def replicas_of_one_body(
    recipe: "str | Recipe",
    model: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    size: int,
    seed: int = 0,
) -> list[Replica]:
    """As `replicas`, to the bit; but ranks that the recipe keeps equal share one model and one optimizer.

    Then N ranks take the memory of one model, and of N gradients while they travel; and one optimizer step is that of all.
    Who changes the model or the optimizer of one rank changes those of all. Ranks that differ have bodies of their own.

    >>> def linear(): return nn.Linear(2, 1)
    >>> def sgd(model): return torch.optim.SGD(model.parameters(), lr=0.1)
    >>> [len({id(r.model) for r in replicas_of_one_body(recipe, linear, sgd, 4)}) for recipe in ("qsgd", "local_sgd(8)")]
    [1, 4]
    """
    maker = ReplicaMaker(recipe, model, optimizer, size, seed)
    if stay_equal(maker.recipe, maker.first):
        return maker.of_one_body()
    return [maker.of_its_own(rank) for rank in range(size)]


def stay_equal(recipe: Recipe, model: nn.Module) -> bool:
    """True if ranks differ in their batches, gradients and memories only, so that one model may stand for all.

    So it is where each step is that of the mean of this step's gradients, which no rank has before all have computed theirs.
    Buffers are each rank's own.

    >>> linear = nn.Linear(2, 2)
    >>> [stay_equal(Recipe.of(text), linear) for text in ("allreduce", "topk", "local_sgd(8)", "allreduce + delayed()", "sgp")]
    [True, True, False, False, False]
    >>> stay_equal(Recipe.of("allreduce"), nn.BatchNorm1d(2))
    False
    """
    differ = {"parts models", "adds momentum", "control"}
    return (
        recipe.schedule.shape.steps_alike
        and recipe.update is None
        and not any(differ & part.traits for part in recipe.parts())
        and next(model.buffers(), None) is None
    )
