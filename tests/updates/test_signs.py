"""The sign of a mean."""

import pytest
import torch
from tests.runtime.gym import Flat, make, noise, sgd, train

from gossamer.core.errors import RecipeError
from gossamer.recipe import Recipe

NUMEL = 7


def uneven(model: torch.nn.Module, rank: int, step: int) -> float:
    """Gradients that differ by powers of ten; the third element's cancel each other."""
    x = model.get_parameter("x")
    x.grad = noise(3, rank, step, numel=NUMEL, dtype=x.dtype) * 10.0 ** torch.arange(NUMEL)
    x.grad[2] = 1.0 - 2.0 * (rank % 2)
    return 0.0


def mean(step: int, size: int) -> torch.Tensor:
    models = [Flat(NUMEL) for _ in range(size)]
    for rank, model in enumerate(models):
        uneven(model, rank, step)
    return torch.stack([m.x.grad for m in models if m.x.grad is not None]).mean(0)


def test_every_element_moves_as_far_as_every_other_and_none_where_the_mean_is_zero() -> None:
    ranks = make("allreduce(fp32()) + signs()", 2, lambda: Flat(NUMEL), sgd(0.01, 0.0))
    expected = ranks[0].flat()
    for step in range(1, 6):
        train(ranks, uneven, 1)
        expected = expected - 0.01 * mean(step, 2).sign()
        assert all(torch.equal(r.flat(), expected) for r in ranks)


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_travels_is_the_gradient_and_its_length_does_not_matter(scale: float) -> None:
    def scaled(model: torch.nn.Module, rank: int, step: int) -> float:
        uneven(model, rank, step)
        model.get_parameter("x").grad *= scale  # pyright: ignore
        return 0.0

    ranks, plain = (make(r, 2, lambda: Flat(NUMEL), sgd(0.01)) for r in ("allreduce(fp32()) + signs()", "allreduce"))
    sent = train(ranks, scaled, 4).ledger.sent
    assert sent == train(plain, uneven, 4).ledger.sent
    twin = make("allreduce(fp32()) + signs()", 2, lambda: Flat(NUMEL), sgd(0.01))
    train(twin, uneven, 4)
    assert torch.equal(ranks[0].flat(), twin[0].flat())


def test_late_ranks_take_the_directions_that_they_missed() -> None:
    ranks = make("allreduce(fp32()) + backup_workers() + signs()", 3, lambda: Flat(NUMEL), sgd(0.01))
    train(ranks, uneven, 8, seconds=lambda rank, step: 3.5 if rank == 2 else 1.0)
    assert ranks[2].worker.record.dropped_steps
    assert torch.equal(ranks[0].flat(), ranks[2].flat())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("allreduce(fp32()) + local_sgd(8) + signs()", "local_sgd(8) averages none: use every_step()"),
        ("sgp + signs()", "gossip() averages none"),
        ("allreduce(fp32()) + every_step(l1=0.1) + signs()", "the threshold needs the gradient's length"),
    ],
)
def test_where_there_is_no_mean_it_is_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)


def test_a_recipe_file_says_it() -> None:
    recipe = Recipe.of("scatter(qsgd()) + signs()")
    assert recipe.to_toml() == "exchange = 'scatter(qsgd())'\nupdate = 'signs()'\n"
    assert Recipe.of(repr(recipe)) == recipe
