"""Ranks that average blocks through one exchange and one memory, step after step, on the simulator."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Context, Exchange, Memory, ReduceResult
from gossamer.core.rng import CounterRng
from gossamer.core.verbs import Program
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.sim import simulate
from gossamer.recipe import Recipe
from gossamer.runtime.loss_scale import rescale


class Crew:
    """Everybody's memory and exchange state; `step` gives the mean that every rank got."""

    def __init__(self, recipe: "str | Recipe", size: int, memory: Memory | None = None, seed: int = 0) -> None:
        parsed = Recipe.of(recipe)
        assert isinstance(parsed.exchange, Exchange)
        self.exchange, self.memory = parsed.exchange, memory or parsed.memory
        self.size, self.seed, self.done = size, seed, 0
        self.kept: list[State] = [{} for _ in range(size)]
        self.carried: list[State] = [{} for _ in range(size)]
        self.scale = 1.0
        self.ledger = Ledger()
        self.echoes: list[ReduceResult] = []
        self.results: list[Tensor] = []  # what each rank got; one of them is all of them, unless a memory parts models

    def step(self, blocks: Sequence[Bucket], lr: float = 1.0, scale: float = 1.0) -> Tensor:
        self.done += 1
        self.echoes = []
        self._follow(scale)
        outcome = simulate([self._program(r, b, lr) for r, b in enumerate(blocks)], ledger=self.ledger)
        first, *others = outcome.results
        alike = all(torch.equal(first, o) for o in others)
        assert alike or self.memory.parts_models or not first.isfinite().all()
        self.results = outcome.results
        return first

    def _follow(self, scale: float) -> None:
        """As the worker does: what is kept comes in the units of the gradients of now."""
        for kept, carried in zip(self.kept, self.carried, strict=True):
            rescale(self.memory, kept, scale / self.scale)
            rescale(self.exchange, carried, scale / self.scale)
        self.scale = scale

    def _program(self, rank: int, block: Bucket, lr: float) -> Program[Tensor]:
        shift = self.memory.follow(self.exchange.omega(block.layout, self.size))
        rng = CounterRng(self.seed, self.done, rank)
        context = Context(rank, self.size, self.done, rng, lr=lr, shift=shift, scale=self.scale)

        def send(block: Bucket, context: Context) -> Program[ReduceResult]:
            result = yield from self.exchange.average(block, self.carried[rank], context)
            self.echoes.append(replace(result, mean=result.mean.clone()))  # the mean is the memory's to write to
            return result

        return self.memory.around(block, self.kept[rank], send, context)

    def mean_of(self, key: str) -> Tensor:
        """The mean over ranks of one entry of the memories."""
        return torch.stack([s[key].double() for s in self.kept]).mean(0)

    def owed(self) -> Tensor | float:
        """What owners of chunks still owe to the mean."""
        return sum((v.double() for s in self.carried for key, v in s.items() if key.endswith("owed")), 0.0)


def mean(blocks: Sequence[Bucket]) -> Tensor:
    return torch.stack([b.flat.double() for b in blocks]).mean(0)
