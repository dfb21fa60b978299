"""SPARTA: the whole model, one cycle, lost models, bytes, rounds around it, checkpoints, and what is refused."""

import pytest
import torch
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, pull, resumed, saved, sgd, train
from torch import nn

from gossamer.core.errors import RecipeError
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe


def test_a_share_of_one_is_local_sgd_at_every_step() -> None:
    crews = [make(f"allreduce + {schedule}", 3) for schedule in ("sparta(1.0)", "local_sgd(1)")]
    for ranks in crews:
        train(ranks, pull, 10)
    assert bit_equal(parameters(crews[0]))
    torch.testing.assert_close(parameters(crews[0])[0], parameters(crews[1])[0], rtol=0, atol=1e-5)


def apart(model: nn.Module, rank: int, step: int) -> float:
    """Ranks step apart once."""
    x = model.get_parameter("x")
    x.grad = noise(rank, numel=x.numel(), dtype=torch.float64) * (step == 1)
    return 0.0


@pytest.mark.parametrize(("share", "cycle"), [(0.5, 2), (0.2, 5), (0.1, 10)])
def test_each_element_is_averaged_once_in_a_cycle_and_the_sum_is_kept(share: float, cycle: int) -> None:
    ranks = make(f"allreduce + sparta({share})", 3, lambda: Flat(20), sgd(0.1, 0.0))
    start = parameters(ranks)[0]
    mean = start - 0.1 * torch.stack([noise(r, numel=20, dtype=torch.float64) for r in range(3)]).mean(0)
    for step in range(1, cycle + 1):
        train(ranks, apart, 1)
        models = torch.stack(parameters(ranks))
        torch.testing.assert_close(models.mean(0), mean, rtol=0, atol=1e-12)
        assert int((models == models[0]).all(0).sum()) == 20 * step // cycle
    assert bit_equal(parameters(ranks))


def test_cycles_take_other_orders() -> None:
    def orders(cycle: int) -> list[int]:
        ranks = make("allreduce + sparta(0.1)", 2, lambda: Flat(10), sgd(0.1, 0.0))
        context = ranks[0].worker.ranks.context(cycle)
        return context.rng.shared_normal("sparta/order", 10).argsort().tolist()

    assert sorted(orders(0)) == list(range(10))
    assert orders(0) != orders(1)


def test_a_lost_model_is_mended_by_the_others() -> None:
    def broken(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = torch.zeros_like(x)
        if (rank, step) == (1, 2):
            x.data.fill_(torch.nan)
        return 0.0

    ranks = make("allreduce + sparta(0.25)", 3, Flat, sgd(0.1, 0.0))
    before = parameters(ranks)[0]
    train(ranks, broken, 8)  # an element that was the first of its cycle may be the last of the next
    for model in parameters(ranks):
        torch.testing.assert_close(model, before, rtol=0, atol=1e-12)


def test_bytes_are_a_share_of_the_model() -> None:
    dense = bytes_per_step("allreduce", {"w": (100_000,)}, 4)
    assert bytes_per_step("allreduce + sparta(0.01)", {"w": (100_000,)}, 4) == pytest.approx(dense / 100, rel=0.01)


def test_it_runs_inside_rounds() -> None:
    ranks = make("allreduce + slowmo(4, inner=sparta(0.25))", 3)
    for step in range(1, 9):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks)) == (step % 4 == 0)


def test_on_one_rank_it_is_plain_training() -> None:
    crews = [make(recipe, 1) for recipe in ("allreduce + sparta()", "allreduce")]
    for ranks in crews:
        train(ranks, pull, 5)
    assert bit_equal([model for ranks in crews for model in parameters(ranks)])


@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_changes_no_bit(stop: int) -> None:
    recipe = "allreduce + sparta(0.25)"
    whole, ranks = make(recipe, 3), make(recipe, 3)
    train(whole, pull, 8)
    train(ranks, pull, stop)
    again = resumed(recipe, saved(ranks))
    train(again, pull, 8 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("allreduce + sparta(0.0)", r"share must lie in \(0, 1\], got 0.0"),
        ("scatter(qsgd()) + sparta()", "element by element and exactly"),
        ("topk + sparta()", "nothing that a residual could be added to"),
    ],
)
def test_what_cannot_work_is_refused_when_the_recipe_is_made(recipe: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.of(recipe)
