"""NoLoCo: two ranks are heavy-ball DiLoCo, the mean of anchors, their spread, pairs, lost models, checkpoints, refusals."""

import pytest
import torch
from tests.runtime.gym import Flat, anchors, bit_equal, make, noise, parameters, pull, resumed, saved, sgd, train
from torch import nn

from gossamer.core.contracts import Context
from gossamer.core.errors import RecipeError
from gossamer.core.rng import CounterRng
from gossamer.planning import bytes_per_step
from gossamer.recipe import Recipe
from gossamer.schedules import NoLoCo
from gossamer.schedules.noloco import pair_of
from gossamer.simulate import Replica


def test_on_two_ranks_it_is_slow_momentum_without_the_rate() -> None:
    pairs, all_ranks = "allreduce + noloco(3)", "gather(fp32()) + slowmo(3, beta=0.9, alpha=0.7, by_lr=False)"
    crews = [make(recipe, 2) for recipe in (pairs, all_ranks)]
    for ranks in crews:
        train(ranks, pull, 12)
    assert bit_equal([model for ranks in crews for model in parameters(ranks)])


@pytest.mark.parametrize("size", [4, 5])
def test_the_mean_of_anchors_moves_as_under_an_average_of_all(size: int) -> None:
    def blind(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = noise(rank, step, numel=x.numel(), dtype=torch.float64)
        return 0.0

    recipes = "allreduce + noloco(2)", "gather(fp32()) + slowmo(2, beta=0.9, alpha=0.7, by_lr=False)"
    crews = [make(recipe, size, Flat, sgd(0.1, 0.0)) for recipe in recipes]
    for ranks in crews:
        train(ranks, blind, 20)
    means = [torch.stack(parameters(ranks)).mean(0) for ranks in crews]
    torch.testing.assert_close(*means, rtol=0, atol=1e-13)
    assert not bit_equal(parameters(crews[0]))


def spread(ranks: list[Replica]) -> float:
    return float(torch.stack([anchors(r) for r in ranks]).var(0).sum())


def test_without_gradients_anchors_come_together() -> None:
    def apart(model: nn.Module, rank: int, step: int) -> float:
        x = model.get_parameter("x")
        x.grad = noise(rank, numel=x.numel(), dtype=torch.float64) * (step == 1)
        return 0.0

    ranks = make("allreduce + noloco(1, rate=0.5, momentum=0.5)", 8, Flat, sgd(1.0, 0.0))
    train(ranks, apart, 1)
    first = spread(ranks)
    train(ranks, apart, 49)
    assert first > 0.1
    assert spread(ranks) < 1e-6 * first


def test_every_rank_meets_one_other_and_pairs_change() -> None:
    def meeting(size: int, step: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        pairs = (pair_of(Context(r, size, step, CounterRng(7, step, r))) for r in range(size))
        return [(pair.to, pair.source) for pair in pairs]

    for size in (2, 3, 4, 5, 8, 9):
        for step in range(20):
            met = meeting(size, step)
            for rank, ((to,), (source,)) in enumerate(met):
                assert to != rank
                assert met[to][1] == (rank,)
                assert met[source][0] == (rank,)
            assert sum(to != source for to, source in met) == (3 if size % 2 else 0)
    assert len({str(meeting(8, step)) for step in range(20)}) > 10  # of 105 pairings


def known(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    object.__setattr__(model, "optimizer", optimizer)
    return optimizer


@pytest.mark.parametrize("lost", [(0,), (0, 1, 2, 3)])
def test_a_lost_model_is_replaced_and_reaches_nobody(lost: tuple[int, ...]) -> None:
    def broken(model: nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        if step == 4 and rank in lost:
            for p in model.parameters():
                p.data.fill_(torch.nan)
        return loss

    ranks = make("allreduce + noloco(2)", 4, optimizer=known)
    train(ranks, broken, 12)
    assert all(model.isfinite().all() for model in parameters(ranks))
    assert ranks[0].worker.record.spoilers()[0] == 1


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resuming_changes_no_bit(stop: int) -> None:
    whole, ranks = make("allreduce + noloco(2)", 3), make("allreduce + noloco(2)", 3)
    train(whole, pull, 8)
    train(ranks, pull, stop)
    again = resumed("allreduce + noloco(2)", saved(ranks))
    train(again, pull, 8 - stop)
    assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(again), strict=True))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_round_sends_one_model(size: int) -> None:
    assert bytes_per_step("allreduce + noloco(4)", {"w": (1000,)}, size) == 1000


def test_on_one_rank_it_is_heavy_ball_on_the_rounds() -> None:
    alone, slow = make("allreduce + noloco(3)", 1), make("allreduce + slowmo(3, beta=0.9, alpha=0.7, by_lr=False)", 1)
    for ranks in (alone, slow):
        train(ranks, pull, 9)
    torch.testing.assert_close(parameters(alone)[0], parameters(slow)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"every": 0}, "every must be at least 1 step, got 0"),
        ({"every": 4, "momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"every": 4, "rate": 0.0}, "0 would freeze the model"),
        ({"every": 4, "rate": 3.0, "momentum": 0.4}, "drives anchors apart; the rate must be at most 2.8"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, float], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        NoLoCo(**values)  # pyright: ignore[reportArgumentType]


def test_codecs_are_refused() -> None:
    with pytest.raises(RecipeError, match="whole models go from rank to rank, uncompressed"):
        Recipe.of("scatter(qsgd()) + noloco(4)")
