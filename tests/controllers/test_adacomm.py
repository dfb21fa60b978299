"""AdaComm: how long rounds are, by the loss."""

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from tests.gang import Gang
from tests.integrations.loops import attached, data
from tests.runtime.gym import bit_equal, make, parameters, pull, train
from torch import Tensor, nn

from gossamer.controllers import AdaComm
from gossamer.core.bucket import State
from gossamer.core.contracts import Facts, ParamGroup
from gossamer.core.errors import GossamerError, RecipeError
from gossamer.recipe import Recipe

DENSE = "allreduce(fp32()) + "


def lengths(controller: AdaComm, told: list[tuple[float, float]]) -> list[int]:
    """Of rounds, after each of these losses and learning rates, an interval each."""
    recipe, state, out = Recipe.of(DENSE + "local_sgd(8)"), State(), list[int]()
    for i, (loss, lr) in enumerate(told):
        facts = Facts((i + 1) * controller.interval, lr, [], loss=loss)
        recipe = controller.decide(facts, recipe, state)
        out.append(recipe.schedule.every)
    return out


@pytest.mark.parametrize(
    ("controller", "told", "wanted"),
    [
        (AdaComm(8), [(4.0, 0.1), (1.0, 0.1), (0.25, 0.1), (0.25, 0.1)], [8, 4, 2, 1]),
        (AdaComm(8), [(1.0, 0.4), (1.0, 0.1)], [8, 16]),
        (AdaComm(8, power=3), [(1.0, 0.4), (1.0, 0.1)], [8, 64]),
        (AdaComm(8, most=10), [(1.0, 0.4), (1.0, 0.1)], [8, 10]),
        (AdaComm(8), [(1.0, 0.1), (4.0, 0.1)], [8, 16]),
        (AdaComm(8, floor=1.0), [(5.0, 0.1), (2.0, 0.1), (0.5, 0.1)], [8, 4, 1]),
        (AdaComm(8), [(nan, 0.1), (4.0, 0.1), (inf, 0.1), (1.0, 0.1)], [8, 8, 8, 4]),
    ],
)
def test_rounds_are_as_long_as_the_loss_and_the_rate_say(
    controller: AdaComm, told: list[tuple[float, float]], wanted: list[int]
) -> None:
    assert lengths(controller, told) == wanted


def test_of_several_rates_it_goes_by_the_mean_of_all_elements() -> None:
    """Three of four elements have a rate that is not the largest, and that is cut."""
    recipe, state = Recipe.of(DENSE + "local_sgd(8)"), State()
    for step, lr in ((8, 0.4), (16, 0.01)):
        groups = ParamGroup(0.4, ["head"], 10), ParamGroup(lr, ["body"], 30)
        recipe = AdaComm(8).decide(Facts(step, 0.4, [], loss=1.0, groups=partial(tuple, groups)), recipe, state)
    assert recipe.schedule.every == 16  # sqrt(0.4 / 0.1075) x 8 = 15.4


def losing(loss: Callable[[int, int], float]) -> Callable[[nn.Module, int, int], float]:
    def backward(m: nn.Module, rank: int, step: int) -> float:
        pull(m, rank, step)
        return loss(rank, step)

    return backward


def test_losses_that_differ_by_rank_make_one_length_and_rounds_end_where_it_says() -> None:
    ranks = make("scatter(qsgd(bits=4, bucket=16)) + slowmo(8) + adacomm(8)", 3)
    told = losing(lambda rank, step: (1 + rank) * (4.0 if step <= 8 else 1.0))
    run = train(ranks, told, 24)
    assert {str(r.worker.recipe.schedule) for r in ranks} == {"slowmo(2)"}  # half as long after a quarter, and again
    assert bit_equal(parameters(ranks))
    ends = sorted({e.step for e in run.ledger if e.verb != "Compute"})
    assert ends == [8, 16, 20, 24]


def telling(rank: int, size: int, how: str) -> str:
    losses = list[Tensor]()

    def report(step: int, metrics: dict[str, float]) -> dict[str, Tensor]:
        return {"loss": losses[-1]}

    options: dict[str, Any] = {"on_metrics": report, "metrics_every": 1} if how == "by on_metrics" else {}
    with attached(DENSE + "local_sgd(2) + adacomm(2)", **options) as (model, optimizer, comm):
        try:
            for step in range(1, 5):
                x, y = data(rank, step)
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                losses.append(loss.detach())
                loss.backward()
                if how == "before":
                    comm.log(loss=loss)
                if how == "the older word":
                    comm.loss(loss)
                optimizer.step()
                if how == "after":
                    comm.log(loss=loss)
        except GossamerError as error:
            return str(error)
        return str(comm.recipe.schedule)


@pytest.mark.gang
def test_a_loop_that_does_not_tell_the_loss_is_told_so(gang2: Gang) -> None:
    assert all("call comm.log(loss=loss)" in text for text in gang2.run(telling, "not at all"))


@pytest.mark.gang
@pytest.mark.parametrize("how", ["before", "after", "the older word", "by on_metrics"])
def test_the_loss_is_told_by_log_before_a_step_or_after_it(gang2: Gang, how: str) -> None:
    first, second = gang2.run(telling, how)
    assert first == second
    assert first.startswith("local_sgd(")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("allreduce + adacomm(8)", r"use local_sgd\(16\) or slowmo\(16\)"),
        ("allreduce + cocod(8) + adacomm(8)", "of variable length"),
        ("allreduce + local_sgd(8) + adacomm(0)", "at least 1 step"),
        ("allreduce + local_sgd(8) + adacomm(8, most=0)", "at least 1 step"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.of(text)
