"""EDiT's guard: neutral settings, a rank that goes astray, running means, clipping, checkpoints, and what is refused."""

from math import inf

import pytest
import torch
from tests.runtime.gym import Flat, bit_equal, make, parameters, pull, resumed, saved, sgd, train
from torch import nn

from gossamer.core.bucket import State
from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe
from gossamer.schedules import EDiTGuard


def alike(model: nn.Module, rank: int, step: int) -> float:
    return pull(model, 0, step)


def test_equal_lengths_and_no_bounds_are_plain_rounds() -> None:
    plain = Recipe.of("gather(fp32()) + slowmo(2)")
    guarded = Recipe.of("gather(fp32()) + slowmo(2, guard=edit_guard(z=1e30, clip=1e30))")
    crews = [make(recipe, 3) for recipe in (plain, guarded)]
    for ranks in crews:
        train(ranks, alike, 12)
    assert bit_equal([model for ranks in crews for model in parameters(ranks)])


@pytest.mark.parametrize("fault", [1000.0, torch.nan])
def test_a_rank_astray_leaves_the_model_to_the_others(fault: float) -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = x.detach() - 1.0
        if rank == 2 and step == 24:
            x.grad = x.grad * fault if fault == fault else x.grad
            if fault != fault:
                x.data.fill_(fault)
        return 0.0

    recipe = "gather(fp32()) + slowmo(2, beta=0.0, guard=edit_guard())"
    ranks, alone = make(recipe, 3, Flat, sgd(0.01, 0.0)), make("gather(fp32()) + local_sgd(2)", 2, Flat, sgd(0.01, 0.0))
    train(ranks, backward, 24)
    train(alone, backward, 24)
    assert bit_equal(parameters(ranks))
    torch.testing.assert_close(parameters(ranks)[0], parameters(alone)[0], rtol=0, atol=1e-12)


def test_a_longer_difference_counts_less_and_an_unusual_one_not() -> None:
    guard, state = EDiTGuard(warmup=3), State()
    first = guard.weights([1.0, 2.0, 1.0], state)
    assert first == [1.0, pytest.approx(0.3679, abs=1e-4), 1.0]
    for _ in range(3):
        guard.weights([1.0, 1.0, 1.0], state)
    assert guard.weights([1.0, 1.0, 1.5], state)[2] == 0.0
    assert guard.weights([1.0, 1.0, inf], state) == [1.0, 1.0, 0.0]
    assert guard.weights([inf, inf, inf], state) == [0.0, 0.0, 0.0]


def test_a_lasting_change_is_followed() -> None:
    guard, state = EDiTGuard(warmup=2), State()
    for _ in range(20):
        guard.weights([1.0, 1.0], state)
    rounds = 0
    while not all(guard.weights([2.0, 2.0], state)):
        rounds += 1
    assert 1 < rounds < 200


def test_lengths_that_grow_in_the_warm_up_are_usual_ones() -> None:
    """As they do while the learning rate grows from nothing."""
    guard, state = EDiTGuard(), State()
    for round in range(10):
        assert guard.weights([float(round)] * 2, state) == [1.0, 1.0]
    assert guard.weights([10.0, 10.0], state) == [1.0, 1.0]


@pytest.mark.parametrize("warmup", [0, 10])
def test_a_rank_whose_first_model_was_not_finite_counts_later(warmup: int) -> None:
    guard, state = EDiTGuard(warmup=warmup), State()
    assert guard.weights([inf, 1.0], state) == [0.0, 1.0]
    later = [guard.weights([1.0, 1.0], state) for _ in range(20)]
    assert later[-1] == [1.0, 1.0]


def test_the_mean_is_clipped() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.ones_like(x)
        return 0.0

    ranks = make("gather(fp32()) + slowmo(1, beta=0.0, guard=edit_guard(clip=0.5))", 2, Flat, sgd(1.0, 0.0))
    before = parameters(ranks)[0]
    train(ranks, backward, 1)
    assert float((parameters(ranks)[0] - before).norm()) == pytest.approx(0.5)


def test_the_weight_of_a_rank_that_is_left_out_does_not_shorten_the_step() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.full_like(x, 0.1)
        if rank == 0 and step == 2:
            x.data.fill_(torch.nan)
        return 0.0

    ranks = make("gather(fp32()) + slowmo(1, beta=0.0, guard=edit_guard())", 4, Flat, sgd(1.0, 0.0))
    for r in ranks:
        r.worker.ranks.weights = (2.5, 0.5, 0.5, 0.5)
    wanted = parameters(ranks)[0] - 0.2
    train(ranks, backward, 2)
    torch.testing.assert_close(parameters(ranks)[0], wanted)


def test_if_no_rank_is_left_all_return_to_the_anchor() -> None:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
            if step == 2:
                p.data.fill_(torch.nan)
        return 0.0

    ranks = make("gather(fp32()) + slowmo(2, guard=edit_guard())", 2, Flat)
    before = parameters(ranks)[0]
    train(ranks, backward, 4)
    assert bit_equal([before, *parameters(ranks)])


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_resuming_changes_no_bit(stop: int) -> None:
    recipe = "gather(fp32()) + slowmo(2, guard=edit_guard(warmup=1))"
    whole, ranks = make(recipe, 3), make(recipe, 3)
    train(whole, pull, 10)
    train(ranks, pull, stop)
    again = resumed(recipe, saved(ranks))
    train(again, pull, 10 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("topk + slowmo(4, guard=edit_guard())", "would be sent in the next round"),
        ("allreduce + slowmo(4, inner=push_sum(), guard=edit_guard())", "leave inner, average and sharded out"),
        ("allreduce + slowmo(4, guard=edit_guard(z=0.0))", "z must be positive, got 0.0"),
        ("allreduce + slowmo(4, guard=edit_guard(clip=0.0))", "clip must be positive, got 0.0"),
        ("allreduce + slowmo(4, guard=edit_guard(decay=1.0))", r"decay must lie in \(0, 1\), got 1.0"),
        ("allreduce + slowmo(4, guard=edit_guard(warmup=-1))", "warmup must be 0 rounds or more, got -1"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_made(recipe: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.of(recipe)
