"""1-bit LAMB: LAMB until the freeze; then trust ratios stay, times what the fresh second moment says."""

from collections.abc import Callable

import pytest
import torch
from tests.laws.blocks import context
from tests.runtime.gym import Odd, bit_equal, make, parameters, pull, train
from tests.updates.test_onebit_adam_update import means
from torch import Tensor, nn

from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError, RecipeError
from gossamer.recipe import Recipe
from gossamer.updates import OneBitLambUpdate


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02)


def lamb(x: Tensor, m: Tensor, root: Tensor, decay: float) -> tuple[Tensor, float]:
    """A step of one tensor, and its trust ratio."""
    u = m / root + decay * x
    c = float((x.norm() / u.norm()).clamp(0.01, 10.0)) if x.norm() and u.norm() else 1.0
    return u, c


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_it_is_lamb_and_after_the_freeze_lamb_with_what_was_frozen(decay: float) -> None:
    text = f"allreduce(fp32()) + onebit_lamb_update(4, weight_decay={decay}, coefficients='frozen')"
    ranks = make(text, 2, optimizer=sgd)
    twin = Odd()
    m, v = ([torch.zeros_like(p) for p in twin.parameters()] for _ in range(2))
    average = [0.0] * len(m)
    for step in range(1, 10):
        for i, (p, g) in enumerate(zip(twin.parameters(), means(2, step, twin), strict=True)):
            warm = min(step, 4)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g**2 if step <= 4 else v[i]
            root = (v[i] / (1 - 0.999**warm)).sqrt() + 1e-8
            u, c = lamb(p.detach(), m[i] / (1 - 0.9**step if step <= 4 else 1.0), root, decay)
            average[i] = 0.9 * average[i] + 0.1 * c if step <= 4 else average[i]
            with torch.no_grad():
                p.sub_(0.02 * (c if step <= 4 else average[i] / (1 - 0.9**4)) * u)
    train(ranks, pull, 9)
    torch.testing.assert_close(ranks[0].flat(), torch.cat([p.detach().reshape(-1) for p in twin.parameters()]))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_stay_equal_and_ratios_within_their_bounds(size: int) -> None:
    ranks = make("onebit_lamb(3, weight_decay=0.01)", size, optimizer=sgd)
    for _ in range(12):
        train(ranks, pull, 1)
        assert bit_equal(parameters(ranks))
    states = ranks[0].worker.buckets[0].states["update"]
    ratios = torch.cat([t for k, t in states.items() if k.startswith("r:")])
    assert bool(((ratios >= 0.5) & (ratios <= 4.0)).all())
    assert not bool((ratios == 1).all())


def test_the_ratio_stays_one_while_the_fresh_second_moment_is_the_frozen_one() -> None:
    """A gradient that never changes, in full and in a momentum that has long been it."""
    update, state = OneBitLambUpdate(400, beta2=0.9), dict[str, Tensor]()
    g = Bucket.of({"w": torch.tensor([[0.5, -2.0], [1.0, 3.0]]), "b": torch.tensor([0.25])})
    model = Bucket.of({"w": torch.ones(2, 2), "b": torch.ones(1)})
    out = g.flat
    for step in range(1, 420):
        out = update.direction(g, model, state, context(step=step))
    assert state["r:w"].tolist() == pytest.approx([1.0], abs=1e-4)
    torch.testing.assert_close(out, torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0]), rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "weight decay": (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1), "weight_decay=0.1 in the recipe"),
    "Adagrad": (lambda m: torch.optim.Adagrad(m.parameters()), "use torch.optim.AdamW"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_would_make_something_else_of_its_steps_is_refused(name: str) -> None:
    optimizer, fix = REFUSED[name]
    with pytest.raises(AttachError) as caught:
        make("onebit_lamb(3)", 2, optimizer=optimizer)
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("onebit_lamb(0)", "at least 1 step"), ("onebit_lamb(3, ratio=2)", "ratio")]
)
def test_numbers_without_sense_are_refused(text: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        Recipe.of(text)
