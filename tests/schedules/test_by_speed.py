"""Local steps by speed: fixed points by what a rank's progress counts, plain rounds where speeds are equal, and who waits for whom."""

import pytest
import torch
from tests.runtime.gym import Flat, Odd, bit_equal, contents, make, parameters, pull, resumed, sgd, train
from torch import nn

from gossamer.core.errors import RecipeError
from gossamer.core.load_balance import local_steps
from gossamer.recipe import Recipe
from gossamer.simulate import Replica

CARRIED = "scatter(qsgd(bits=4, bucket=16)) + by_speed(slowmo(4))"


def thrice(rank: int, step: int) -> float:
    """Seconds of a step: rank 0's are three times as long."""
    return 3.0 if rank == 0 else 1.0


def twice(rank: int, step: int) -> float:
    return 2.0 if rank == 0 else 1.0


def towards_its_rank(model: nn.Module, rank: int, step: int) -> float:
    x = model.get_parameter("x")
    x.grad = x.detach() - rank
    return 0.0


@pytest.mark.parametrize(("weigh", "optimum"), [("nova", 1 / 2), ("tokens", 9 / 10), ("equal", 3 / 4)])
def test_it_ends_where_its_weights_say(weigh: str, optimum: float) -> None:
    """f_0 = x^2 / 2 in one step a round, f_1 = (x - 1)^2 / 2 in three."""
    ranks = make(f"allreduce(fp32()) + by_speed(local_sgd(3), weigh='{weigh}')", 2, lambda: Flat(1), sgd(0.05, 0.0))
    train(ranks, towards_its_rank, 3 * 60, seconds=thrice)
    assert [len(r.losses) for r in ranks] == [3 + 59, 3 * 60]
    for model in parameters(ranks):
        assert float(model) == pytest.approx(optimum, abs=0.02)


def test_weights_of_data_count_besides() -> None:
    ranks = make("allreduce(fp32()) + by_speed(local_sgd(3))", 2, lambda: Flat(1), sgd(0.05, 0.0))
    for r in ranks:
        r.worker.ranks.weights = (1.5, 0.5)
    train(ranks, towards_its_rank, 3 * 120, seconds=thrice)
    assert float(parameters(ranks)[0]) == pytest.approx(1 / 4, abs=0.02)


@pytest.mark.parametrize(
    "then", ["local_sgd(4)", "local_sgd(4, warmup=3)", "slowmo(4, 0.9, 0.7, by_lr=False, nesterov=True)"]
)
def test_at_one_speed_it_is_what_it_wraps_bit_for_bit(then: str) -> None:
    for speed in (0.0, 0.3):
        plain, paced = (make(f"scatter(qsgd(bits=4, bucket=16)) + {s}", 3) for s in (then, f"by_speed({then})"))
        for ranks in (plain, paced):
            train(ranks, pull, 13, seconds=lambda rank, step, speed=speed: speed)
        assert bit_equal([torch.cat(parameters(plain)), torch.cat(parameters(paced))])


def test_after_a_round_nobody_waits_for_the_slow_rank() -> None:
    ranks = make(CARRIED, 3)
    train(ranks, pull, 4 * 6, seconds=twice)
    assert [r.clock for r in ranks] == [4 * 2 + 5 * 4] * 3
    assert [len(r.losses) for r in ranks] == [4 + 5 * 2, 24, 24]
    assert [r.worker.step for r in ranks] == [25] * 3
    assert bit_equal(parameters(ranks))


def test_whoever_gets_faster_or_slower_gets_other_steps() -> None:
    ranks = make("allreduce(fp32()) + by_speed(local_sgd(4))", 2)
    for slow, taken in (
        (0, 4 + 2 + 2),
        (1, 2 + 4 + 4),
    ):  # a round before, of which half is remembered, is still planned for
        before = len(ranks[0].losses)
        train(ranks, pull, 4 * 3, seconds=lambda rank, step, slow=slow: 2.0 if rank == slow else 1.0)
        assert len(ranks[0].losses) - before == taken


@pytest.mark.parametrize(
    "recipe",
    [
        "gather(topk(ratio=0.2)) + error_feedback() + by_speed(local_sgd(4), weigh='tokens')",
        "allreduce(powersgd()) + error_feedback() + by_speed(slowmo(4, buffers='average'))",
        "gather(topk(ratio=0.2)) + ef21(eta=1.0) + by_speed(local_sgd(4), weigh='equal')",
    ],
)
def test_any_codec_carries_it(recipe: str) -> None:
    ranks = make(recipe, 3, optimizer=sgd(momentum=0.0))
    train(ranks, pull, 4 * 10, seconds=twice)
    assert len(ranks[0].losses) < len(ranks[1].losses)
    assert bit_equal(parameters(ranks))
    assert sum(r.losses[-1] for r in ranks) < 0.8 * sum(r.losses[0] for r in ranks)


def test_a_run_that_goes_on_takes_up_its_plan() -> None:
    """Saved at every number that ranks have in common, over two rounds."""

    def on(ranks: list[Replica]) -> None:
        train(ranks, pull, 2, seconds=twice)

    whole = make(CARRIED, 2, Odd)
    for _ in range(2):
        on(whole)  # the first round is not planned
    for _ in range(4):
        again = resumed(CARRIED, contents(whole))
        on(again)
        on(whole)
        assert bit_equal([torch.cat(parameters(whole)), torch.cat(parameters(again))])
        assert [r.worker.step for r in whole] == [r.worker.step for r in again]


@pytest.mark.parametrize(
    ("seconds", "now", "steps"),
    [
        ((1.0, 1.0, 2.0), (8, 8, 8), [8, 8, 4]),
        ((1.0, 1.09, 2.0), (8, 8, 8), [8, 8, 4]),
        ((1.0, 1.0, 100.0), (8, 8, 8), [8, 8, 1]),
        ((1.0, 1.0, 1.9), (8, 8, 4), [8, 8, 4]),
        ((1.0, 1.0, 1.0), (8, 8, 4), [8, 8, 8]),
        ((0.0, 1.0, 9.0), (8, 8, 4), [8, 8, 4]),
    ],
)
def test_a_plan_lets_nobody_wait_for_long(seconds: tuple[float, ...], now: tuple[int, ...], steps: list[int]) -> None:
    assert local_steps(8, seconds, now) == steps


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("allreduce(fp32()) + by_speed(every_step())", "has no rounds"),
        ("allreduce(fp32()) + by_speed(slowmo(8, inner=push_sum()))", "has no rounds"),
        ("allreduce(fp32()) + hierarchical(2, 2, by_speed(local_sgd(8)))", "wait for each other for ever"),
        ("gather(sign(scale='one')) + none(allow_biased=True) + by_speed(local_sgd(8))", "does not change its vote"),
        ("gather(topk()) + ef21(eta=1.0) + by_speed(local_sgd(8))", "remembers the mean under the old weights"),
        ("scatter(qsgd()) + diana() + by_speed(local_sgd(8))", "remembers the mean under the old weights"),
        ("allreduce(fp32()) + by_speed(local_sgd(8)) + adacomm(4)", "equally many steps per round"),
    ],
)
def test_what_cannot_be_is_refused(recipe: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.of(recipe)
