"""AdaScale and the batch that grows with noise: what is estimated, and what is decided from it."""

from collections.abc import Callable

import pytest
import torch
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, train
from tests.schedules.rates import known_sgd
from torch import Tensor, nn

from gossamer.codecs import FP32
from gossamer.controllers import AdaScale
from gossamer.controllers.noise import look
from gossamer.core.bucket import Bucket, State
from gossamer.core.contracts import Facts
from gossamer.core.errors import AttachError, RecipeError
from gossamer.exchanges import AllReduced
from gossamer.recipe import Recipe

DENSE = "allreduce(fp32()) + "
RANKS, NUMEL = 4, 50


def facts(gradients: list[Tensor], step: int = 1) -> Facts:
    exchange = AllReduced(FP32())
    sums = torch.stack([AdaScale().local(Bucket.of({"x": g}), exchange) for g in gradients]).sum(0)
    return Facts(step, 0.1, [Bucket.of({"x": torch.stack(gradients).mean(0)})], [sums])


def drawn(signal: float, spread: float, step: int) -> list[Tensor]:
    return [
        signal / NUMEL**0.5 + spread / NUMEL**0.5 * noise(7, rank, step, numel=NUMEL, dtype=torch.float64)
        for rank in range(RANKS)
    ]


def test_the_estimates_are_right_on_average() -> None:
    """Over 400 steps of noise 3 and signal 1; z < 5 by a normal law: 6e-7."""
    state: State = {}
    told = [look(facts(drawn(1.0, 3.0, step)), {})[:2] for step in range(400)]
    for step in range(400):
        known = look(facts(drawn(1.0, 3.0, step)), state)
    estimates = torch.tensor(told, dtype=torch.float64)
    # those of a single step are kept from below zero, which the running ones are not
    assert abs(float(estimates[:, 0].mean()) - 9) < 5 * float(estimates[:, 0].std()) / 20
    assert known.variance == pytest.approx(9, rel=0.1)
    assert known.signal == pytest.approx(1, rel=0.35)
    assert known.gain == pytest.approx((9 + 1) / (9 / 4 + 1), rel=0.15)
    assert known.scale == pytest.approx(9, rel=0.5)


def test_equal_gradients_are_worth_one_step_and_pure_noise_as_many_as_there_are_ranks() -> None:
    one = noise(1, numel=NUMEL, dtype=torch.float64)
    assert look(facts([one] * RANKS), {}).gain == pytest.approx(1)
    assert look(facts([one, -one, one, -one]), {}).gain == pytest.approx(RANKS)
    assert look(facts([one]), {}).gain == 1  # nothing to tell them apart by


def backward(gradient: Callable[[int, int], Tensor]) -> Callable[[nn.Module, int, int], float]:
    def backward(m: nn.Module, rank: int, step: int) -> float:
        for p in m.parameters():
            p.grad = gradient(rank, step).clone()
        return 0.0

    return backward


@pytest.mark.parametrize(("noisy", "worth"), [(False, 1.0), (True, 4.0)])
def test_a_step_is_as_long_as_it_is_worth_and_progress_counts_it(noisy: bool, worth: float) -> None:
    def gradient(rank: int, step: int) -> Tensor:
        return (1e-9 if noisy else 1.0) + float(noisy) * (-1.0) ** rank * torch.ones(5, dtype=torch.float64)

    ranks = make(DENSE + "adascale()", RANKS, lambda: Flat(5), known_sgd())
    train(ranks, backward(gradient), 1)
    before = parameters(ranks)[0]
    train(ranks, backward(gradient), 1)
    mean = 1e-9 if noisy else 1.0
    assert float((before - parameters(ranks)[0]).mean()) == pytest.approx(
        0.1 * mean * worth, rel=0.03
    )  # rates lie 5 % apart
    (progress,) = {float(r.worker.controller.state["progress"]) for r in ranks}
    assert progress == pytest.approx(1.0 + worth, rel=0.03)
    assert bit_equal(parameters(ranks))


def test_the_rate_of_a_schedule_counts_besides() -> None:
    ranks = make(DENSE + "every_step(rate=0.5) + adascale()", 2, lambda: Flat(5), known_sgd())
    opposed = backward(lambda rank, step: 1e-9 + (-1.0) ** rank * torch.ones(5, dtype=torch.float64))
    train(ranks, opposed, 3)
    assert ranks[0].worker.recipe.schedule.shape.lr_factor == pytest.approx(1.0, rel=0.03)
    assert float(ranks[0].worker.controller.state["progress"]) == pytest.approx(1.0 + 2.0 + 2.0, rel=0.03)


def test_the_batch_grows_with_the_noise_and_the_rate_with_it_up_to_the_most() -> None:
    def loud(rank: int, step: int) -> Tensor:
        return 0.1 + noise(3, rank, step, numel=5, dtype=torch.float64)

    ranks = make(DENSE + "noise_batch(5, warmup=3)", RANKS, lambda: Flat(5), known_sgd())
    seen = list[tuple[int, float]]()
    for _ in range(12):
        train(ranks, backward(loud), 1)
        schedule = ranks[0].worker.recipe.schedule
        seen.append((schedule.shape.micro_batches, schedule.shape.lr_factor))
    assert seen[1] == (1, 1.0)
    assert list(dict.fromkeys(seen)) == [(1, 1.0), (2, 2.0), (4, 4.0)]
    quiet = make(DENSE + "noise_batch(8, warmup=3)", RANKS, lambda: Flat(5), known_sgd())
    train(quiet, backward(lambda rank, step: 1 + 0.1 * loud(rank, step)), 12)
    assert quiet[0].worker.recipe.schedule.shape.micro_batches == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("qsgd + adascale()", "adds its own noise"),
        ("qsgd + noise_batch(4)", r"accordion_batch\(\)"),
        ("local_sgd(4) + adascale()", "sends no gradients"),
        ("allreduce + adascale(slack=1.0)", r"\[0.01, 1\)"),
        ("allreduce + noise_batch(0)", "at least 1 micro-batch"),
        ("allreduce + noise_batch(4, factor=1)", "at least 2"),
    ],
)
def test_what_cannot_be_right_is_refused_with_the_fix(text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        Recipe.of(text)


def test_adam_is_refused_for_its_steps_do_not_grow_with_the_gradient() -> None:
    with pytest.raises(AttachError, match=r"torch\.optim\.SGD"):
        make("allreduce + adascale()", 2, optimizer=lambda m: torch.optim.Adam(m.parameters()))
