"""Law 5: a gradient that is not finite, on any rank, never touches a memory on any rank; training goes on."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.runtime import fleet
from tests.runtime.gym import (
    anchors,
    bit_equal,
    make,
    parameters,
    pull,
    remembered,
    resumed,
    same_memory,
    saved,
    sgd,
    spoiled,
    train,
)

NAN, INF = float("nan"), float("inf")
gentle = sgd(lr=0.02, momentum=0.0)  # error feedback around few ranks bears no long strides
AVERAGING = [*fleet.SETTLING, *fleet.QUORUM, *fleet.OWN]


def with_values() -> Iterator[Any]:
    """All with NaN; with an infinity those by hand, which have each exchange: all else hears of the verdict only."""
    for recipe, value in product(
        fleet.each([r for r in AVERAGING if r in fleet.PROMPT or r not in fleet.SETTLING]), (NAN, -INF, INF)
    ):
        slow = value == INF or (value == -INF and recipe.id not in fleet.BY_HAND)
        marks = [*recipe.marks, *([pytest.mark.slow] if slow else [])]
        yield pytest.param(recipe.id, value, id=f"{recipe.id}-{value}", marks=marks)


@pytest.mark.parametrize(("recipe", "value"), [*with_values()])
def test_a_spoilt_gradient_leaves_every_memory_and_model_as_it_was(recipe: str, value: float) -> None:
    ranks = make(recipe, 3)
    train(ranks, pull, 3)
    memories, models = [remembered(r.worker) for r in ranks], parameters(ranks)
    train(ranks, spoiled([(1, 4)], value), 1)
    assert all(same_memory(before, remembered(r.worker)) for before, r in zip(memories, ranks))
    assert all(bit_equal(pair) for pair in zip(models, parameters(ranks)))
    train(ranks, pull, 1)
    assert not bit_equal([models[0], parameters(ranks)[0]])


@pytest.mark.parametrize("recipe", fleet.each(AVERAGING))
def test_training_survives_spoilt_steps_with_equal_finite_replicas(recipe: str) -> None:
    spoilt = [(0, 1), (2, 2), (1, 3), (1, 15), (0, 16), (2, 16)]
    ranks = make(recipe, 3, optimizer=gentle)
    train(ranks, spoiled(spoilt, NAN), 24)
    assert bit_equal(parameters(ranks)) or recipe in fleet.OWN
    assert all(model.isfinite().all() for model in parameters(ranks))
    assert all(t.isfinite().all() for r in ranks for t in remembered(r.worker).values() if t.is_floating_point())
    assert sum(r.losses[-1] for r in ranks) < sum(r.losses[0] for r in ranks)


@pytest.mark.parametrize("recipe", ["topk(ratio=0.1)", "scatter(qsgd(bits=4, bucket=16)) + diana()", "powersgd"])
def test_two_hundred_steps_with_many_of_them_spoilt(recipe: str) -> None:
    spoilt = [(step % 3, step) for step in range(1, 200) if step % 7 in (0, 1) or step % 50 > 45]
    ranks = make(recipe, 3, optimizer=gentle)
    train(ranks, spoiled(spoilt, INF), 200)
    assert bit_equal(parameters(ranks))
    assert sum(r.losses[-1] for r in ranks) < 0.7 * sum(r.losses[0] for r in ranks)


@pytest.mark.parametrize("recipe", [*fleet.LOCAL, *fleet.OVERLAP])
def test_a_local_step_with_a_spoilt_gradient_is_left_out(recipe: str) -> None:
    ranks = make(recipe, 3)
    train(ranks, spoiled([(0, 1), (2, 2), (1, 3), (1, 10)], NAN), 30)
    assert bit_equal([anchors(r) for r in ranks])
    assert all(model.isfinite().all() for model in parameters(ranks))


def broken(at: tuple[int, int]):
    """`pull`, but at this (rank, step) the model itself and its momentum are lost: no scaler was there to skip."""

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        if (rank, step) == at:
            for p in model.parameters():
                p.data.fill_(NAN)
            for state in model.optimizer.state.values():  # pyright: ignore
                state["momentum_buffer"].fill_(NAN)
        return loss

    return backward


def known(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD that the model knows of, so that a backward can get at it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    object.__setattr__(model, "optimizer", optimizer)
    return optimizer


@pytest.mark.parametrize("recipe", [r for r in fleet.LOCAL if "average" not in r])
def test_a_lost_model_costs_one_round_and_no_memory(recipe: str) -> None:
    ranks = make(recipe, 3, optimizer=known)
    train(ranks, pull, 3)
    memories, models = [remembered(r.worker) for r in ranks], parameters(ranks)
    train(ranks, broken((1, 5)), 3)
    if (
        ranks[0].worker.recipe.schedule.shape.mixer is None
    ):  # under gossip the rank takes its neighbours' model, and no round is lost
        assert all(same_memory(before, remembered(r.worker)) for before, r in zip(memories, ranks))
        assert all(bit_equal(pair) for pair in zip(models, parameters(ranks)))
    train(ranks, pull, 9)
    assert bit_equal(parameters(ranks))
    assert parameters(ranks)[0].isfinite().all()
    assert not bit_equal([models[0], parameters(ranks)[0]])


@pytest.mark.parametrize("recipe", fleet.OVERLAP)
def test_a_lost_model_comes_back_from_the_anchor_under_overlap(recipe: str) -> None:
    ranks = make(recipe, 3, optimizer=known)
    train(ranks, broken((1, 5)), 6)
    train(ranks, pull, 15)
    assert bit_equal([anchors(r) for r in ranks])
    assert all(model.isfinite().all() for model in parameters(ranks))
    assert ranks[1].losses[-1] < ranks[1].losses[0]


@pytest.mark.parametrize("stop", [5, 6, 7, 8])
def test_a_lost_round_is_remembered_across_a_checkpoint(stop: int) -> None:
    """Lost at step 6, due to land at step 9: the anchor must be taken then, saved in between or not."""
    recipe = fleet.OVERLAP[0]
    whole, ranks = make(recipe, 3, optimizer=known), make(recipe, 3, optimizer=known)
    train(whole, broken((1, 5)), 12)
    train(ranks, broken((1, 5)), stop)
    again = resumed(recipe, saved(ranks), optimizer=known)
    for crew in (ranks, again):
        train(crew, broken((1, 5)), 12 - stop)
        assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(crew)))


def test_fp16_overflow_skips_the_step_and_training_goes_on() -> None:
    def huge(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        if step == 3 and rank == 0:
            model.get_parameter("bias").grad = torch.full((7,), 1e6)
        return loss

    ranks = make("fp16", 2)
    train(ranks, huge, 2)
    before = parameters(ranks)[0]
    train(ranks, huge, 1)
    assert bit_equal([before, *parameters(ranks)])
    train(ranks, huge, 1)
    assert not bit_equal([before, parameters(ranks)[0]])


def test_a_double_precision_gradient_beyond_float32_is_finite() -> None:
    from gossamer.kernels.finite import all_finite

    assert all_finite([torch.tensor([1e300], dtype=torch.float64), torch.zeros(0)])
    assert not all_finite([torch.tensor([1.0]), torch.tensor([1.0, NAN])])
    assert not all_finite([torch.tensor([INF], dtype=torch.float64)])
