"""What a controller wants to know of all ranks' own gradients: sums, in one small message, on every fabric and on paper."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import attached, small_step
from tests.runtime.gym import Odd, bit_equal, make, parameters, pull, train
from torch import Tensor

from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Controller, Facts
from gossamer.core.errors import GossamerError, RecipeError
from gossamer.core.parts import parse
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe

FEW = " + bucket(0.0003)"
seen = list[tuple[list[list[float]], list[float]]]()


@dataclass(frozen=True, repr=False)
class ByNoise(Controller):
    """More bits while the ranks' gradients are unlike: sum of |g_i|^2 against N |mean|^2."""

    said: int = 2
    name = "by_noise"

    @property
    def counts(self) -> int:
        return self.said

    def local(self, block: Bucket, exchange: Any) -> Tensor:
        return torch.stack([block.flat.double().square().sum(), block.flat.new_ones((), dtype=torch.float64)])

    def reach(self, recipe: Any) -> Iterable[Any]:
        return [replace(recipe, exchange=parse(f"gather(qsgd(bits={bits}))")) for bits in (2, 8)]

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        means = [float(b.flat.double().square().sum()) for b in facts.blocks]
        seen.append(([s.tolist() for s in facts.sums], means))
        noise = sum(float(s[0]) / float(s[1]) for s in facts.sums) / max(sum(means), 1e-30)
        return replace(recipe, exchange=parse(f"gather(qsgd(bits={8 if noise > 1.5 + 0.1 * (facts.step % 3) else 2}))"))


@dataclass(frozen=True, repr=False)
class Silent(Controller):
    """Decides the same, and counts nothing."""

    name = "silent"

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        assert facts.sums == ()
        return recipe


def noisy(exchange: str = "gather(qsgd(bits=8))", controller: Controller | None = None) -> Recipe:
    return replace(Recipe.of(exchange + FEW), controller=controller or ByNoise())


def test_all_ranks_get_the_sums_of_what_each_told_and_decide_alike() -> None:
    seen.clear()
    ranks = make(noisy("allreduce(fp32())"), 3)
    train(ranks, pull, 1)
    assert seen[0] == seen[1] == seen[2]
    sums, _ = seen[0]
    own = [
        torch.cat([p.grad.reshape(-1) for p in r.model.parameters() if p.grad is not None]) for r in one_step_alone()
    ]
    assert sum(s for s, _ in sums) == pytest.approx(sum(float(g.double().square().sum()) for g in own), rel=1e-6)
    assert [n for _, n in sums] == [3.0] * len(ranks[0].worker.buckets)
    assert len(sums) > 1
    for _ in range(8):
        train(ranks, pull, 1)
        assert len({repr(r.worker.recipe) for r in ranks}) == 1
    assert bit_equal(parameters(ranks))


def one_step_alone() -> Any:
    ranks = make("allreduce", 3)
    for i, r in enumerate(ranks):
        pull(r.model, i, 1)
    return ranks


def test_they_are_free_of_the_loss_scale() -> None:
    sums = list[Any]()
    for scale in (1.0, 1024.0):
        seen.clear()
        ranks = make(noisy("allreduce(fp32())"), 2)

        def backward(model: torch.nn.Module, rank: int, step: int, scale: float = scale) -> float:
            loss = pull(model, rank, step)
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad * scale
            return loss

        for r in ranks:
            r.worker.scale = scale
        train(ranks, backward, 1)
        sums.append(seen[0])
    assert sums[0] == sums[1]


def test_their_bytes_are_in_the_ledger_and_on_paper_and_without_them_there_are_none() -> None:
    shapes = {n: tuple(p.shape) for n, p in Odd().named_parameters()}
    plain = Recipe.of("allreduce(fp32())" + FEW)
    size, counted = 4, dict[str, int]()
    for recipe in (plain, replace(plain, controller=Silent()), replace(plain, controller=Constant())):
        ranks = make(recipe, size)
        sent = train(ranks, pull, 3).ledger.sent
        assert sent == 3 * size * bytes_per_step(recipe, shapes, size)
        counted[recipe.controller.name] = sent
    buckets = len(ranks[0].worker.buckets)
    assert counted["silent"] == counted["fixed"]
    assert counted["constant"] - counted["fixed"] == 3 * 2 * (size - 1) * 8 * 2 * buckets


@dataclass(frozen=True, repr=False)
class Constant(Controller):
    """Counts, and decides the same."""

    name = "constant"

    @property
    def counts(self) -> int:
        return 2

    def local(self, block: Bucket, exchange: Any) -> Tensor:
        return torch.ones(2)

    def decide(self, facts: Facts, recipe: Any, state: State) -> Any:
        assert all(s.tolist() == [4.0, 4.0] for s in facts.sums)
        return recipe


def test_where_no_gradients_leave_there_is_nothing_to_count() -> None:
    with pytest.raises(
        RecipeError, match=r"by_noise\(said=2\)|by_noise\(\) needs statistics of each rank's gradients.*every_step"
    ):
        replace(Recipe.of("local_sgd(2)"), controller=ByNoise())


def test_another_number_of_numbers_than_said_is_an_error() -> None:
    with pytest.raises(GossamerError, match=r"declares 3 number\(s\) for a bucket, and its `local` returned 2 for"):
        train(make(noisy(controller=ByNoise(said=3)), 2), pull, 1)


def hooked(rank: int, size: int) -> tuple[Any, str]:
    seen.clear()
    with attached(noisy()) as (model, optimizer, comm):
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return seen, repr(comm.recipe)


@pytest.mark.gang
def test_on_gloo(gang2: Gang) -> None:
    one, other = gang2.run(hooked)
    assert one == other
    assert len(one[0]) == 4
    assert all([n for _, n in sums] == [2.0] * len(sums) for sums, _ in one[0])
