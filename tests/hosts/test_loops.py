"""Training loops as they are: accumulation, clipping, schedulers, groups, precisions, unused and shared parameters."""

import contextlib
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.hosts.loops import SMALL, Awkward, attached, data, flat, loss_of, same, sgd, small_step
from torch import Tensor, nn

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang


def accumulated(rank: int, size: int, recipe: str, parts: int) -> Tensor:
    """Four rows at once, or one by one."""
    with attached(recipe) as (model, optimizer, comm):
        for step in range(1, 5):
            optimizer.zero_grad()
            x, y = data(rank, step)
            for i, (xs, ys) in enumerate(zip(x.chunk(parts), y.chunk(parts))):
                with contextlib.nullcontext() if i == parts - 1 else comm.no_sync():
                    ((model(xs) - ys).square().mean() / parts).backward()
            optimizer.step()
        assert comm.step == 4
        comm.check_sync()
        return flat(model)


@pytest.mark.parametrize("recipe", ["allreduce" + SMALL, "powersgd" + SMALL, "local_sgd(2)"])
def test_accumulation_is_the_big_batch(gang2: Gang, recipe: str) -> None:
    whole, pieces = gang2.run(accumulated, recipe, 1), gang2.run(accumulated, recipe, 4)
    assert not same(whole[0], pieces[0])
    torch.testing.assert_close(whole[0], pieces[0], rtol=1e-4, atol=1e-5)


def clipped(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What the optimizer sees after clipping, and what it should see: the clipped mean of all ranks' gradients."""
    means = list[Tensor]()
    for other in range(size):
        twin = Awkward()
        loss_of(twin, other, 1).backward()
        means.append(
            torch.cat(
                [torch.zeros_like(p).view(-1) if p.grad is None else p.grad.reshape(-1) for p in twin.parameters()]
            )
        )
    mean = torch.stack(means).mean(0)
    with attached("allreduce" + SMALL) as (model, _, _):
        loss_of(model, rank, 1).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(norm, mean.norm())
        seen = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    return seen, mean * 0.1 / mean.norm()


def test_clipping_after_backward_clips_the_mean(gang2: Gang) -> None:
    for seen, wanted in gang2.run(clipped):
        assert seen.norm() == pytest.approx(0.1, rel=1e-4)
        torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-6)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "lr": 0.02, "weight_decay": 0.3}, {"params": others, "lr": 0.1, "weight_decay": 0.0}]
    )


def scheduled(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor]:
    """Two parameter groups under a scheduler; and the same in one process on both ranks' rows."""
    with attached(recipe, optimizer=groups) as (model, optimizer, comm):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for _ in range(5):
            small_step(model, optimizer, comm, rank)
            scheduler.step()
        comm.check_sync()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.02 * 0.7**5)
        together = flat(model)
    alone = Awkward()
    optimizer = groups(alone)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(1, 6):
        optimizer.zero_grad()
        (sum(loss_of(alone, r, step) for r in range(size)) / size).backward()
        optimizer.step()
        scheduler.step()
    return together, flat(alone)


@pytest.mark.parametrize("recipe", ["allreduce" + SMALL, "gather(fp32())", "topk(ratio=1.0)"])
def test_groups_and_schedulers_are_as_in_one_process(gang2: Gang, recipe: str) -> None:
    for together, alone in gang2.run(scheduled, recipe):
        torch.testing.assert_close(together, alone, rtol=2e-4, atol=2e-5)


class Branches(nn.Module):
    """One branch for even ranks, one for odd, one for nobody; a frozen layer; a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(17, 17)
        self.again = nn.Linear(17, 17)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.even, self.odd, self.nobody = nn.Linear(17, 7), nn.Linear(17, 7), nn.Linear(17, 7)
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.again(torch.tanh(self.first(x)))))
        return self.even(h) if self.rank % 2 == 0 else self.odd(h)


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def branched(rank: int, size: int, recipe: str, find: bool) -> dict[str, Tensor]:
    start = Branches().state_dict()
    with attached(recipe, Branches(), decaying, find_unused_parameters=find) as (model, optimizer, comm):
        for step in range(1, 5):
            model.rank = rank if step != 3 else 0  # at the third step nobody takes the odd branch
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert all(p.grad is None for p in model.frozen.parameters())
            optimizer.step()
        comm.check_sync()
        assert model.again.weight is model.first.weight
        return {n: (t - start[n]).abs().max() for n, t in model.state_dict().items()} | {"flat": flat(model)}


@pytest.mark.parametrize("recipe", ["allreduce" + SMALL, "topk(ratio=0.5)" + SMALL, "local_sgd(2)"])
@pytest.mark.parametrize("find", [True, False])
def test_unused_frozen_and_tied_parameters(gang2: Gang, recipe: str, find: bool) -> None:
    a, b = gang2.run(branched, recipe, find)
    assert same(a["flat"], b["flat"])
    assert a["frozen.weight"] == 0
    assert a["even.weight"] > 0
    assert a["odd.weight"] > 0
    local = "local" in recipe  # there an unused parameter has no gradient anyway
    assert (a["nobody.weight"] == 0) == (find or local)


def precise(rank: int, size: int, recipe: str, dtype: torch.dtype) -> tuple[Tensor, float]:
    with attached(recipe, Awkward(dtype)) as (model, optimizer, comm):
        first = seen_by_all(model, size)
        for _ in range(12):
            small_step(model, optimizer, comm, rank)
        assert all(p.dtype == dtype and (p.grad is None or p.grad.dtype == dtype) for p in model.parameters())
        comm.check_sync()
        return flat(model), first - seen_by_all(model, size)


@torch.no_grad()
def seen_by_all(model: nn.Module, size: int) -> float:
    return sum(float(loss_of(model, r, step)) for r in range(size) for step in range(1, 13))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce" + SMALL,
        "terngrad",
        "topk(ratio=0.2)" + SMALL,
        "powersgd",
        "slowmo(3, beta=0.1)",
        "qsgd + local_sgd(3)",
        "backup(backups=0)",
    ],
)
def test_other_precisions_train(gang2: Gang, recipe: str, dtype: torch.dtype) -> None:
    (a, gain), (b, _) = gang2.run(precise, recipe, dtype)
    assert torch.equal(a, b)
    assert gain > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["sgp", "osgp", "overlap_local_sgd(3)"])
def test_other_precisions_mix(gang2: Gang, recipe: str, dtype: torch.dtype) -> None:
    for model, gain in gang2.run(precise, recipe, dtype):
        assert model.isfinite().all()
        assert gain > 0


def zeroed(rank: int, size: int, to_none: bool) -> Tensor:
    with attached("topk(ratio=0.3)" + SMALL) as (model, optimizer, comm):
        for step in range(1, 6):
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, rank, step).backward()
            optimizer.step()
        comm.check_sync()
        return flat(model)


def test_gradients_set_to_zero_are_as_good_as_none(gang2: Gang) -> None:
    assert same(gang2.run(zeroed, True)[0], gang2.run(zeroed, False)[0])


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 6, sparse=sparse)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x).mean(1))


def embedded(rank: int, size: int, sparse: bool, to_none: bool) -> Tensor:
    with attached("allreduce" + SMALL, Words(sparse), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)) as (
        m,
        opt,
        comm,
    ):
        for step in range(4):
            words = torch.randint(50, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
            opt.zero_grad(set_to_none=to_none)
            m(words).square().sum().backward()
            opt.step()
        comm.check_sync()
        return flat(m)


def test_sparse_gradients_are_averaged_like_dense_ones(gang2: Gang) -> None:
    dense = gang2.run(embedded, False, True)[0]
    for to_none in (True, False):
        torch.testing.assert_close(gang2.run(embedded, True, to_none)[0], dense)


def refused(rank: int, size: int, recipe: str) -> list[str]:
    """What is said about steps that cannot be right."""
    said = list[str]()
    with attached(recipe) as (model, optimizer, comm):
        with pytest.raises(AttachError) as caught:
            optimizer.step(lambda: loss_of(model, rank, 1))
        said.append(str(caught.value))
        if comm.recipe.schedule.averages_gradients:
            with pytest.raises(AttachError) as caught:
                optimizer.step()
            said.append(str(caught.value))
            with comm.no_sync():
                loss_of(model, rank, 1).backward()
            with pytest.raises(AttachError, match="no_sync"):
                optimizer.step()
        small_step(model, optimizer, comm, rank)  # and training goes on
        comm.check_sync()
        assert comm.step == 1
    return said


@pytest.mark.parametrize("recipe", ["qsgd", "slowmo(2)"])
def test_closures_and_steps_without_gradients_are_refused(gang2: Gang, recipe: str) -> None:
    for said in gang2.run(refused, recipe):
        assert "closure" in said[0]
        assert all("without averaged gradients" in text for text in said[1:])


def grown(rank: int, size: int) -> dict[str, Any]:
    """Accordion grows the batch: the loop asks how many micro-batches make a step."""
    rates, sizes = list[float](), list[int]()
    recipe = "accordion_batch(epoch=2, factor=4, interval=1, threshold=1000.0)"
    with attached(recipe, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01)) as (model, optimizer, comm):
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        while comm.step < 8:
            sizes.append(comm.accumulate)
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return {"rates": rates, "sizes": sizes, "after": optimizer.param_groups[0]["lr"]}


def test_accordion_grows_batch_and_rate_together(gang2: Gang) -> None:
    for seen in gang2.run(grown):
        assert seen["sizes"] == [1] * 4 + [4] * 4
        assert seen["rates"] == pytest.approx([0.01] * 4 + [0.04] * 4)
        assert seen["after"] == 0.01


def unscheduled(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Two backward passes that both send: the mean of the sum."""
    with attached("allreduce" + SMALL) as (model, _, _):
        for step in (1, 2):
            loss_of(model, rank, step).backward()
        twice = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    with attached("allreduce" + SMALL) as (model, _, comm):
        with comm.no_sync():
            loss_of(model, rank, 1).backward()
        loss_of(model, rank, 2).backward()
        return twice, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_accumulation_that_sends_every_time_gives_the_same_sum(gang2: Gang) -> None:
    for twice, once in gang2.run(unscheduled):
        torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-6)


__all__ = ["sgd"]
