"""Momentum correction: what it computes, what it masks, and what it does not go with."""

import pytest
import torch
from tests.laws.blocks import vector
from tests.laws.crew import Crew, mean
from tests.runtime.gym import Flat, make, parameters, pull, sgd, train
from torch import Tensor

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe


def gradients(step: int, size: int = 3, numel: int = 50) -> list[Bucket]:
    rng = torch.Generator().manual_seed(step)
    return [vector(torch.randn(numel, generator=rng, dtype=torch.float64)) for _ in range(size)]


def test_it_is_the_paper_s_formula_step_by_step() -> None:
    """u = m u + g, v = v + u, the k largest |v| leave, and both are zero there."""
    crew, m, k = Crew("gather(topk(ratio=0.1)) + momentum_correction(momentum=0.8)", 3), 0.8, 5
    u, v = torch.zeros(3, 50, dtype=torch.float64), torch.zeros(3, 50, dtype=torch.float64)
    for step in range(12):
        blocks = gradients(step)
        u = m * u + torch.stack([b.flat for b in blocks])
        v = v + u
        chosen = torch.zeros_like(v, dtype=torch.bool).scatter_(1, v.abs().topk(k, 1).indices, True)
        sent = torch.where(chosen, v, 0.0)
        u, v = torch.where(chosen, 0.0, u), torch.where(chosen, 0.0, v)
        torch.testing.assert_close(crew.step(blocks), sent.mean(0), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.stack([s["velocity"] for s in crew.kept]), u, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(torch.stack([s["residual"] for s in crew.kept]), v, rtol=1e-6, atol=1e-5)


def test_without_masking_nothing_is_lost_of_the_gradients_momentum() -> None:
    """Sum of means + mean of what is kept = sum of what plain momentum would have sent."""
    crew = Crew("allreduce(count_sketch(ratio=0.05, candidates=2)) + momentum_correction(masking=False)", 3)
    velocity = given = got = torch.zeros(200, dtype=torch.float64)
    for step in range(8):
        blocks = gradients(step, numel=200)
        velocity = 0.9 * velocity + mean(blocks)
        given, got = given + velocity, got + crew.step(blocks)
    torch.testing.assert_close(got + crew.mean_of("residual"), given, rtol=1e-10, atol=1e-10)


def test_an_element_that_cancels_to_zero_and_is_sent_is_masked_too() -> None:
    crew = Crew("gather(topk(ratio=0.5)) + momentum_correction(momentum=0.5)", 1)
    for g in ([1.0, 8.0], [-1.5, 8.0], [0.0, 0.0]):  # v = 1, 1 + (.5 - 1.5) = 0
        crew.step([vector(torch.tensor(g))])
    assert crew.kept[0]["residual"].tolist() == [0.0, 0.0]
    assert crew.kept[0]["velocity"].tolist()[0] == 0.0


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_long_gradients_are_shortened_before_anything_is_added(scale: float) -> None:
    """Each parameter to clip / sqrt(N), whatever the loss scale; short ones stay as they are."""
    crew = Crew("gather(topk(ratio=1.0)) + momentum_correction(momentum=0.0, clip=3.0)", 9)
    blocks = [Bucket.of({"long": torch.full((4,), 8.0 + r), "short": torch.full((4,), 0.25)}) for r in range(9)]
    got = crew.step([b.like(b.flat * scale) for b in blocks], scale=scale) / scale
    torch.testing.assert_close(got, torch.tensor([0.5] * 4 + [0.25] * 4))


def test_what_is_not_finite_is_not_clipped_away() -> None:
    for value in (float("nan"), float("inf")):
        crew = Crew("gather(topk(ratio=0.5)) + momentum_correction(clip=1.0)", 2)
        assert not crew.step([vector(torch.tensor([1.0, value])), vector(torch.ones(2))]).isfinite().all()


def losses(recipe: str, momentum: float) -> Tensor:
    ranks = make(recipe, 3, optimizer=sgd(lr=0.02, momentum=momentum))
    train(ranks, pull, 40)
    return torch.stack(parameters(ranks))


def test_where_all_travels_and_nothing_is_masked_it_is_the_optimizer_s_momentum() -> None:
    there = losses("allreduce", 0.9)
    here = losses("allreduce(fp32()) + momentum_correction(momentum=0.9, masking=False)", 0.0)
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exchange", ["gather(topk(ratio=0.1))", "allreduce(count_sketch(ratio=0.05))"])
def test_without_momentum_it_is_error_feedback_bit_for_bit(exchange: str) -> None:
    ours = losses(f"{exchange} + momentum_correction(momentum=0.0)", 0.9)
    assert torch.equal(ours, losses(f"{exchange} + error_feedback()", 0.9))


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("allreduce(fp32()) + momentum_correction()", "masking would stop all momentum"),
        ("scatter(bf16()) + momentum_correction()", "masking would stop all momentum"),
        ("scatter(topk()) + momentum_correction()", "masking would stop all momentum"),
        ("gather(topk(ratio=1.0)) + momentum_correction()", "masking would stop all momentum"),
        ("allreduce(powersgd()) + momentum_correction()", r"use momentum_correction\(masking=False\)"),
        ("gather(qsgd(bits=2)) + momentum_correction(masking=False)", "can diverge"),
        ("gather(topk()) + momentum_correction() + slowmo(8)", "differences of models hold the optimizer's momentum"),
        ("gather(topk()) + momentum_correction(momentum=1.0)", r"momentum must lie in \[0, 1\)"),
        ("gather(topk()) + momentum_correction(clip=0.0)", "clip must be above 0, got 0.0; leave it out"),
        ("gather(dropping(warmup=8)) + momentum_correction()", "masking would stop all momentum"),
        ("topk + rule('ndim < 2', allreduce(fp32()), momentum_correction())", "masking would stop all momentum"),
    ],
)
def test_what_it_would_spoil_is_refused(recipe: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        Recipe.of(recipe)


OWN = ["dgc(momentum=0.9)", "sketched_sgd(momentum=0.9)", "fetchsgd(momentum=0.9)", "diana(momentum=0.9)"]


@pytest.mark.parametrize("recipe", OWN)
@pytest.mark.parametrize(
    "optimizer",
    [
        sgd(),
        lambda model: torch.optim.Adam(model.parameters()),
        lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.5),
    ],
    ids=["SGD", "Adam", "RMSprop"],
)
def test_momentum_is_not_added_twice(recipe: str, optimizer) -> None:
    with pytest.raises(
        AttachError, match=r"both add momentum.*torch.optim.SGD with momentum=0, or .* momentum=0.0 in the recipe"
    ):
        make(recipe, 2, optimizer=optimizer)


@pytest.mark.parametrize("recipe", OWN)
def test_an_optimizer_without_momentum_is_welcome(recipe: str) -> None:
    make(recipe, 2, optimizer=sgd(momentum=0.0))
    make(recipe, 2, optimizer=lambda model: torch.optim.Adagrad(model.parameters()))


def test_a_preset_with_warm_up_and_clipping_is_the_paper_s() -> None:
    recipe = Recipe.of("dgc(momentum=0.9, warmup=400, clip=2.0)")
    codec = "dropping(ratio=0.001, warmup=400, fall='quarters')"
    assert repr(recipe).startswith(f"gather({codec}) + momentum_correction(clip=2.0) + rule('ndim < 2', ")
    assert "momentum_correction(masking=False, clip=2.0)" in repr(recipe)


@pytest.mark.parametrize("recipe", ["dgc", "sketched_sgd", "fetchsgd"])
def test_the_presets_leave_momentum_to_any_optimizer_unless_told(recipe: str) -> None:
    make(recipe, 2, lambda: Flat(300), lambda model: torch.optim.Adam(model.parameters()))
