"""Overlap Local-SGD: the self-tests T4.1 to T4.7 of the method notes."""

from collections.abc import Callable

import pytest
import torch
from tests.runtime.gym import Flat, Network, anchors, bit_equal, make, on_all, parameters, pull, resumed, saved, train
from tests.schedules.rates import (
    NUMEL,
    Rate,
    constant,
    cosine,
    gradient,
    known_sgd,
    model,
    scheduled,
    steps_down,
)
from torch import Tensor

from gossamer.core.errors import RecipeError
from gossamer.schedules import OverlapLocalSGD

Pull = Callable[[Tensor, int, int], Tensor]


USUAL = (lambda: Flat(NUMEL)), known_sgd()


def start() -> Tensor:
    return Flat(NUMEL).x.detach().clone()


def crew(every: int, alpha: float, beta: float, size: int):
    return make(f"overlap_local_sgd({every}, alpha={alpha}, beta={beta})", size, lambda: Flat(NUMEL), known_sgd())


def by_hand(
    size: int, rounds: int, every: int, alpha: float, beta: float, vanilla: bool = False, rate: Rate = constant
):
    """The paper, rank after rank: X is the mean right after the last pull. Yields models and anchor of each round.

    Its momentum u is in units of the gradient: u = beta u + (X - a) / lr;  a += lr u.
    """
    models, anchor = [start() for _ in range(size)], start()
    velocity, flying = torch.zeros(NUMEL, dtype=torch.float64), None
    for round in range(rounds):
        for step in range(round * every + 1, (round + 1) * every + 1):
            models = [x - rate(step) * gradient(x, i, step) for i, x in enumerate(models)]
        if flying is not None and vanilla:
            anchor = flying
        elif flying is not None:
            velocity = beta * velocity + (flying - anchor) / rate(step)
            anchor = anchor + rate(step) * velocity
        models = [(1 - alpha) * x + alpha * anchor for x in models]
        flying = torch.stack(models).mean(0)
        yield models, anchor


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("every", "alpha", "beta"), [(1, 0.6, 0.7), (3, 0.6, 0.0), (4, 0.3, 0.5)])
def test_it_is_the_formula_of_the_paper(size: int, every: int, alpha: float, beta: float) -> None:
    ranks = crew(every, alpha, beta, size)
    for models, anchor in by_hand(size, 6, every, alpha, beta):
        train(ranks, scheduled(constant), every)
        for r, expected in zip(ranks, models, strict=True):
            torch.testing.assert_close(model(r), expected, rtol=0, atol=1e-13)
            torch.testing.assert_close(anchors(r), anchor, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rate", [cosine, steps_down])
def test_its_momentum_follows_a_learning_rate_that_changes(rate: Rate) -> None:
    ranks, fixed = crew(3, 0.6, 0.7, 2), make("allreduce + overlap_local_sgd(3, by_lr=False)", 2, *USUAL)
    for models, anchor in by_hand(2, 8, 3, 0.6, 0.7, rate=rate):
        for r in (ranks, fixed):
            train(r, scheduled(rate), 3)
        torch.testing.assert_close(anchors(ranks[0]), anchor, rtol=0, atol=1e-13)
        torch.testing.assert_close(model(ranks[1]), models[1], rtol=0, atol=1e-13)
    assert not torch.allclose(anchors(fixed[0]), anchor, rtol=0, atol=1e-4)


def test_without_momentum_the_anchor_is_the_mean_of_a_round_ago() -> None:
    ranks = crew(3, 0.6, 0.0, 4)
    for models, anchor in by_hand(4, 6, 3, 0.6, 0.0, vanilla=True):
        train(ranks, scheduled(constant), 3)
        torch.testing.assert_close(anchors(ranks[0]), anchor, rtol=0, atol=1e-14)
        torch.testing.assert_close(model(ranks[2]), models[2], rtol=0, atol=1e-14)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("alpha", [0.2, 0.6, 0.9])
def test_mixing_conserves_the_weighted_sum_and_training_moves_it_by_a_known_share(alpha: float, every: int) -> None:
    """y = (1 - alpha) mean x + alpha a' moves in a round by -(1 - alpha) lr sum of mean gradients, and by nothing else.

    a' is the anchor that is in flight: the mean of the models right after the pull.
    """
    gradients = list[Tensor]()

    def watched(x: Tensor, rank: int, step: int) -> Tensor:
        gradients.append(gradient(x, rank, step))
        return gradients[-1]

    ranks, size = crew(every, alpha, 0.0, 4), 4
    train(ranks, scheduled(constant, watched), every)
    for _ in range(8):
        in_flight = torch.stack(parameters(ranks)).mean(0)
        before = in_flight  # (1 - alpha) mean x + alpha a' with both the same
        gradients.clear()
        train(ranks, scheduled(constant, watched), every)
        torch.testing.assert_close(anchors(ranks[0]), in_flight, rtol=0, atol=1e-15)
        mean = torch.stack(parameters(ranks)).mean(0)
        progress = 0.1 * torch.stack(gradients).sum(0) / size
        torch.testing.assert_close(mean, before - (1 - alpha) * progress, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.0), (0.6, 0.7), (0.3, 0.5), (0.9, 0.2)])
def test_progress_per_step_is_the_effective_rate(alpha: float, beta: float) -> None:
    def downhill(x: Tensor, rank: int, step: int) -> Tensor:
        return torch.ones(NUMEL, dtype=torch.float64)

    ranks = crew(4, alpha, beta, 3)
    train(ranks, scheduled(constant, downhill), 4 * 200)
    before = model(ranks[0])
    train(ranks, scheduled(constant, downhill), 4)
    per_step = (before - model(ranks[0])) / 4
    expected = 0.1 * (1 - alpha) / (1 - alpha * beta)
    torch.testing.assert_close(per_step, torch.full_like(per_step, expected), rtol=1e-9, atol=0)


def deviations(ranks) -> Tensor:
    models = torch.stack(parameters(ranks))
    return models - models.mean(0)


@pytest.mark.parametrize("alpha", [0.25, 0.6])
@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_without_gradients_models_approach_each_other_by_one_minus_alpha(alpha: float, beta: float) -> None:
    def once(x: Tensor, rank: int, step: int) -> Tensor:
        return gradient(x, rank, step) if step <= 2 else torch.zeros_like(x)

    ranks = crew(2, alpha, beta, 4)
    train(ranks, scheduled(constant, once), 2)
    for _ in range(10):
        before = deviations(ranks)
        train(ranks, scheduled(constant, once), 2)
        torch.testing.assert_close(deviations(ranks), (1 - alpha) * before, rtol=0, atol=1e-15)


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_on_equal_ranks_it_is_the_formula_with_their_own_copy(beta: float) -> None:
    ranks = crew(2, 0.6, beta, 2)
    for models, _ in by_hand(1, 5, 2, 0.6, beta):
        train(ranks, scheduled(constant, lambda x, rank, step: gradient(x, 0, step)), 2)
        torch.testing.assert_close(model(ranks[0]), models[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("recipe", ["overlap_local_sgd(2)", "topk(ratio=0.2) + overlap_local_sgd(2)"])
def test_landing_is_by_schedule_so_a_slow_network_changes_no_bit(recipe: str) -> None:
    def run(network: Network | None) -> tuple[list[Tensor], float]:
        ranks = make(recipe, 4)
        seconds = train(ranks, pull, 12, network, lambda rank, step: 0.1 + 0.01 * ((rank * 3 + step) % 4)).seconds
        return parameters(ranks), seconds

    instant, fast = run(None)
    delayed, slow = run(Network(latency=0.4, rate=(1e3, 2e4, 1e6, 5e3)))
    assert slow > 3 * fast
    assert all(bit_equal(pair) for pair in zip(instant, delayed))


def test_a_network_as_slow_as_a_round_costs_nothing() -> None:
    """At N = 2 a latency of L makes an all-reduce take 2 L; a round is 4 steps of one second."""

    def seconds(latency: float) -> float:
        return train(make("overlap_local_sgd(4)", 2), pull, 12, Network(latency), lambda rank, step: 1.0).seconds

    assert seconds(0.0) == seconds(1.0) == seconds(2.0) == 12.0
    assert seconds(3.0) == pytest.approx(4 + 6 + 6)  # launched at 4, landed at 10, launched, landed at 16
    assert train(make("local_sgd(4)", 2), pull, 12, Network(2.0), lambda rank, step: 1.0).seconds == pytest.approx(24.0)


def test_what_is_in_flight_is_a_copy() -> None:
    """The models are overwritten while the average of step 2 travels; it lands at step 4 as it was launched."""

    def landed(poison: bool) -> Tensor:
        def spoil(model: torch.nn.Module, rank: int, step: int) -> float:
            loss = scheduled(constant)(model, rank, step)
            if poison and step == 3:
                model.get_parameter("x").data.fill_(float(rank) - 77.0)
            return loss

        ranks = crew(2, 0.6, 0.7, 3)
        train(ranks, spoil, 4, Network(latency=10.0), lambda rank, step: 1.0)
        assert (abs(model(ranks[0])) > 9).all() == poison
        return anchors(ranks[0])

    assert bit_equal([landed(False), landed(True)])


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6, 7])
def test_saving_with_a_message_in_flight_changes_no_bit(stop: int) -> None:
    recipe = "topk(ratio=0.2) + overlap_local_sgd(3)"
    whole, ranks = make(recipe, 3), make(recipe, 3)
    train(whole, pull, 12)
    train(ranks, pull, stop)
    files = saved(ranks)
    again = resumed(recipe, files)
    assert again[0].worker.loop.averages.in_flight() == (stop >= 3)
    for crew_ in (ranks, again):  # saving disturbs the run that goes on as little as the one that resumes
        train(crew_, pull, 12 - stop)
        assert all(bit_equal(pair) for pair in zip(parameters(whole), parameters(crew_)))


def test_waiting_for_what_is_in_flight_does_not_let_it_land() -> None:
    ranks = crew(2, 0.6, 0.7, 2)
    train(ranks, scheduled(constant), 2)
    before = [anchors(r) for r in ranks]
    on_all(ranks, lambda w: w.quiesce())
    on_all(ranks, lambda w: w.quiesce())
    assert all(bit_equal(pair) for pair in zip(before, [anchors(r) for r in ranks]))
    assert all(r.worker.loop.averages.in_flight() for r in ranks)


@pytest.mark.parametrize(
    ("make_it", "reason"),
    [
        (lambda: OverlapLocalSGD(4, alpha=1.0), "freezes the model"),
        (lambda: OverlapLocalSGD(4, alpha=0.0), "never synchronises"),
        (lambda: OverlapLocalSGD(4, beta=1.0), r"\[0, 1\)"),
        (lambda: OverlapLocalSGD(0), "at least 1"),
    ],
)
def test_impossible_values_are_refused(make_it, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        make_it()
