"""Training loops as they are: accumulation, clipping, schedulers, several groups; and steps that cannot be right."""

import contextlib
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, data, flat, loss_of, same, small_step
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


def refused(rank: int, size: int, recipe: str) -> list[str]:
    """What is said about steps that cannot be right."""
    said = list[str]()
    with attached(recipe) as (model, optimizer, comm):
        if comm.recipe.schedule.shape.averages_gradients:
            for closure in (None, lambda: loss_of(model, rank, 1)):
                with pytest.raises(AttachError) as caught:
                    optimizer.step(closure)
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
def test_steps_without_gradients_are_refused(gang2: Gang, recipe: str) -> None:
    for said in gang2.run(refused, recipe):
        assert all("without averaged gradients" in text for text in said)


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
        loss_of(model, rank, 1).backward()
        with pytest.warns(UserWarning, match=r"one line: model.no_sync = comm.no_sync"):
            loss_of(model, rank, 2).backward()
        loss_of(model, rank, 3)  # a forward alone changes nothing
        twice = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    with attached("allreduce" + SMALL) as (model, _, comm):
        with comm.no_sync():
            loss_of(model, rank, 1).backward()
        loss_of(model, rank, 2).backward()
        return twice, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_accumulation_that_sends_every_time_gives_the_same_sum(gang2: Gang) -> None:
    for twice, once in gang2.run(unscheduled):
        torch.testing.assert_close(twice, once, rtol=1e-5, atol=1e-6)


class Derived(torch.optim.SGD):
    """Adds something of its own to a step of torch's, as many do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.param_groups[0]["params"][0].data.mul_(0.99)
        return loss


def derived(rank: int, size: int, recipe: str) -> tuple[int, Tensor]:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # so that torch calls hooks in its step too
    with attached(recipe, optimizer=lambda model: Derived(model.parameters(), lr=0.05)) as (model, optimizer, comm):
        for _ in range(4):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return comm.step, flat(model)


@pytest.mark.parametrize("recipe", ["local_sgd(2)", "distributed_lion"])
def test_an_optimizer_that_calls_the_step_of_its_base_takes_one_step(gang2: Gang, recipe: str) -> None:
    (steps, one), (_, other) = gang2.run(derived, recipe)
    assert steps == 4
    assert same(one, other)
