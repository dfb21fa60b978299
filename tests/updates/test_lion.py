"""Distributed Lion: it is Lion where ranks agree, a vote or a mean where they do not, and momenta stay where they are."""

from typing import Any

import pytest
import torch
from tests.runtime.gym import (
    Flat,
    bit_equal,
    by_name,
    make,
    noise,
    parameters,
    pull,
    remembered,
    resumed,
    saved,
    sgd,
    spoiled,
    train,
)
from torch import Tensor, nn

from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe

EXACT = "allreduce(fp32()) + lion()"
COIN = "scatter(sign('one'), feedback=0.0, own='encoded') + none(allow_biased=True) + lion()"
NUMEL = 7
RATE, DECAY = 0.01, 0.1


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, weight_decay=DECAY)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def alike(model: nn.Module, rank: int, step: int) -> float:
    """The same gradient on all ranks; the third element never has one."""
    x = model.get_parameter("x")
    x.grad = noise(3, step, numel=NUMEL, dtype=x.dtype)
    x.grad[2] = 0.0
    return 0.0


def opposed(model: nn.Module, rank: int, step: int) -> float:
    alike(model, rank, step)
    model.get_parameter("x").grad *= 1 - 2 * (rank % 2)  # pyright: ignore
    return 0.0


def lion(steps: int) -> Tensor:
    """Lion by itself, as its paper writes it."""
    model = Flat(NUMEL)
    x, m = model.x.detach(), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(1, steps + 1):
        alike(model, 0, step)
        g = model.x.grad
        assert g is not None
        x = x - RATE * ((0.9 * m + 0.1 * g).sign() + DECAY * x)
        m = 0.99 * m + 0.01 * g
    return x


@pytest.mark.parametrize("recipe", [EXACT, "distributed_lion", "distributed_lion(combine='mean')"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_rank_and_ranks_of_equal_data_are_lion(recipe: str, size: int) -> None:
    ranks = make(recipe, size, lambda: Flat(NUMEL), plain)
    train(ranks, alike, 12)
    for rank in ranks:
        torch.testing.assert_close(rank.flat(), lion(12), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", [EXACT, "distributed_lion", "distributed_lion(combine='mean')"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_oppose_each_other_stand_still(recipe: str, size: int) -> None:
    ranks = make(recipe, size, lambda: Flat(NUMEL), sgd(RATE, 0.0))
    before = ranks[0].flat().clone()
    train(ranks, opposed, 6)
    assert all(torch.equal(rank.flat(), before) for rank in ranks)


def test_signs_without_zeros_break_ties_by_one_coin_for_all() -> None:
    """Two ranks, 5 steps of coins for 4 elements: an odd number of coins never adds up to zero."""

    def half(model: nn.Module, rank: int, step: int) -> float:
        alike(model, rank, step)
        model.get_parameter("x").grad[::2] *= 1 - 2 * (rank % 2)  # pyright: ignore
        return 0.0

    ranks = make(COIN, 2, lambda: Flat(NUMEL), sgd(RATE, 0.0))
    before = ranks[0].flat().clone()
    train(ranks, half, 5)
    assert bit_equal(parameters(ranks))
    assert ((ranks[0].flat() - before)[::2].abs() > RATE / 2).all()


@pytest.mark.parametrize(
    ("recipe", "expected"), [("distributed_lion", 1.0), ("distributed_lion(combine='mean')", 1 / 3)]
)
def test_two_votes_of_three_win_and_a_mean_counts_them(recipe: str, expected: float) -> None:
    def divided(model: nn.Module, rank: int, step: int) -> float:
        alike(model, rank, step)
        model.get_parameter("x").grad *= 1000.0 if rank == 0 else -1e-3  # pyright: ignore
        return 0.0

    ranks = make(recipe, 3, lambda: Flat(NUMEL), sgd(RATE, 0.0))
    model = Flat(NUMEL)
    alike(model, 0, 1)
    assert model.x.grad is not None
    train(ranks, divided, 1)
    moved = model.x.detach() + RATE * expected * model.x.grad.sign()
    torch.testing.assert_close(ranks[0].flat(), moved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("combine", "expected"), [("vote", 1.0), ("mean", 0.5)])
def test_a_rank_that_counts_three_times_as_much_does_so_where_signs_are_sent(combine: str, expected: float) -> None:
    ranks = make(f"allreduce(fp32()) + lion(combine='{combine}')", 2, lambda: Flat(NUMEL), sgd(RATE, 0.0))
    for r in ranks:
        r.worker.ranks.weights = (1.5, 0.5)
    model = Flat(NUMEL)
    alike(model, 0, 1)
    assert model.x.grad is not None
    train(ranks, opposed, 1)
    moved = model.x.detach() - RATE * expected * model.x.grad.sign()
    for rank in ranks:
        torch.testing.assert_close(rank.flat(), moved, rtol=1e-12, atol=1e-12)


def test_a_vote_costs_a_twentieth_of_a_dense_average() -> None:
    sent = {}
    for recipe in ("allreduce", "distributed_lion"):
        ranks = make(recipe, 4, lambda: Flat(40_000, torch.float32), sgd(RATE, 0.0))
        sent[recipe] = train(ranks, lambda model, rank, step: float(model.get_parameter("x").sum().backward() or 0), 1)
    dense, votes = (run.ledger.sent for run in sent.values())
    assert dense / votes == pytest.approx(20, rel=0.01)


def test_momenta_are_each_rank_s_own_and_every_rank_saves_its_own() -> None:
    ranks = make("distributed_lion", 3, optimizer=plain)
    train(ranks, pull, 5)
    momenta = [by_name(r.worker.buckets, "update", "m")["matrix"] for r in ranks]
    assert not torch.equal(momenta[0], momenta[1])
    again = resumed("distributed_lion", saved(ranks), optimizer=plain)
    for old, new in zip(ranks, again, strict=True):
        for key, value in remembered(old.worker, "update").items():
            assert bit_equal([value, remembered(new.worker, "update")[key]])
    for run in (ranks, again):
        train(run, pull, 5)
    assert all(bit_equal([a, b]) for a, b in zip(parameters(ranks), parameters(again), strict=True))
    assert bit_equal(parameters(ranks))


@pytest.mark.parametrize("recipe", [EXACT, "distributed_lion", "distributed_lion(combine='mean')"])
def test_a_gradient_that_is_not_finite_votes_for_nothing(recipe: str) -> None:
    ranks = make(recipe, 2, optimizer=plain)
    train(ranks, spoiled([(0, 2), (1, 4)], float("inf")), 5)
    train(ranks, spoiled([(1, 6)], float("nan")), 1)
    assert [r.worker.record.skipped for r in ranks] == [3, 3]
    assert all(p.isfinite().all() for p in parameters(ranks))
    assert all(m.isfinite().all() for r in ranks for m in remembered(r.worker, "update").values())


@pytest.mark.parametrize("optimizer", [sgd(0.01, 0.9), adamw])
def test_a_second_momentum_is_refused(optimizer: Any) -> None:
    with pytest.raises(
        AttachError, match=r"lion\(\) with (SGD|AdamW): both add momentum.*use torch.optim.SGD with momentum=0"
    ):
        make("distributed_lion", 2, optimizer=optimizer)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("allreduce(fp32()) + lion(beta1=1.0)", "lion: beta1 must lie in [0, 1), got 1.0"),
        ("allreduce(fp32()) + lion(combine='median')", "combine must be one of 'vote', 'mean', got 'median'"),
        ("allreduce(fp32()) + local_sgd(8) + lion()", "local_sgd(8) averages none: use every_step()"),
        ("gather(topk()) + momentum_correction() + lion()", "sends a momentum"),
        ("scatter(vote()) + local_sgd(4)", "vote()"),
    ],
)
def test_what_cannot_be_right_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)
