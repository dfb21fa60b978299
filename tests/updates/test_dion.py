"""Dion: orthonormal steps from a momentum of which only factors travel; with compression as without."""

from typing import Any

import pytest
import torch
from tests.laws.blocks import context
from tests.runtime.gym import Flat, bit_equal, make, noise, parameters, pull, resumed, saved, sgd, spoiled, train
from torch import Tensor, nn

import gossamer
from gossamer.core.bucket import Bucket
from gossamer.core.errors import AttachError, RecipeError
from gossamer.core.rng import CounterRng
from gossamer.recipe import Recipe
from gossamer.simulate import Backward
from gossamer.updates import DionUpdate

EXACT = "allreduce(fp32()) + dion_update(3)"
FACTORS = "dion(3)"
plain = sgd(0.02, 0.0)


class Matrix(nn.Module):
    """One matrix and one vector, in double precision."""

    def __init__(self, n: int = 12, m: int = 8) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n, m, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(5, dtype=torch.float64))


def low_rank(n: int, m: int, rank: int, *key: int) -> Tensor:
    left, right = (
        noise(1, *key, numel=n * rank, dtype=torch.float64),
        noise(2, *key, numel=m * rank, dtype=torch.float64),
    )
    return left.view(n, rank) @ right.view(rank, m)


def mixed(model: nn.Module, rank: int, step: int) -> float:
    """Gradients that differ between ranks and steps, of full rank."""
    for i, (_, p) in enumerate(model.named_parameters()):
        p.grad = noise(i, rank, step, numel=p.numel(), dtype=p.dtype).view(p.shape)
    return 0.0


def mean_of(size: int) -> Backward:
    def backward(model: nn.Module, rank: int, step: int) -> float:
        found = list[list[Tensor]]()
        for r in range(size):
            mixed(model, r, step)
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        for p, grads in zip(model.parameters(), zip(*found, strict=True), strict=True):
            p.grad = torch.stack(grads).mean(0)
        return 0.0

    return backward


def dion(model: nn.Module, backward: Backward, steps: int, rank: int, mu: float, start: Tensor) -> Tensor:
    """Dion by itself, as its authors' simple form: M whole, Q with unit columns."""
    w = model.get_parameter("w")
    n, m = w.shape
    momentum, q, x = torch.zeros_like(w), start, w.detach().clone()
    for step in range(1, steps + 1):
        backward(model, 0, step)
        assert w.grad is not None
        momentum = momentum + w.grad
        p = torch.linalg.qr(momentum @ q)[0]
        r = momentum.t() @ p
        momentum = momentum - (1 - mu) * p @ r.t()
        q = r / r.norm(dim=0)
        x = x - 0.02 * (n / m) ** 0.5 * p @ q.t()
    return x


@pytest.mark.parametrize("recipe", [EXACT, FACTORS])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_of_unlike_data_step_as_one_on_their_mean_and_factors_lose_nothing(recipe: str, size: int) -> None:
    ranks = make(recipe, size, Matrix, plain)
    q = CounterRng(3, 1, 0).shared_normal("w/powersgd", 3, 8).double().t()
    train(ranks, mixed, 8)
    alone = dion(Matrix(), mean_of(size), 8, 3, 0.95, q)
    for rank in ranks:
        torch.testing.assert_close(rank.model.get_parameter("w").detach(), alone, rtol=1e-9, atol=1e-9)
    assert bit_equal(parameters(ranks))


@pytest.mark.parametrize("size", [2, 3])
def test_vectors_get_their_mean_gradient_as_it_is(size: int) -> None:
    ranks, judge = make(FACTORS, size, Matrix, plain), Matrix()
    backward = mean_of(size)
    for step in range(1, 6):
        backward(judge, 0, step)
        with torch.no_grad():
            judge.b.sub_(judge.b.grad, alpha=0.02)  # pyright: ignore[reportArgumentType]
        train(ranks, mixed, 1)
    torch.testing.assert_close(ranks[0].model.get_parameter("b"), judge.b)


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (6, 6)])
def test_at_full_rank_the_same_gradient_leads_to_an_orthonormal_step(shape: tuple[int, int]) -> None:
    """Power iteration is exact when it has come to the singular directions, not at the first step; values differ by half."""
    n, m = shape
    few = min(n, m)
    left = torch.linalg.qr(noise(1, numel=n * few, dtype=torch.float64).view(n, few))[0]
    right = torch.linalg.qr(noise(2, numel=m * few, dtype=torch.float64).view(m, few))[0]
    mean = Bucket.of({"w": left * 2.0 ** -torch.arange(few, dtype=torch.float64) @ right.t()})
    update, state, found = DionUpdate(few, momentum=0.0), dict[str, Tensor](), mean.flat
    for step in range(1, 41):
        found = update.direction(mean, mean, state, context(step=step))
        assert float(state["kept"].abs().max()) < 1e-12
    values = torch.linalg.svdvals(found.view(n, m) * (m / n) ** 0.5)
    torch.testing.assert_close(values, torch.ones_like(values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_gradient_of_its_rank_leaves_no_momentum_where_mu_is_zero(rank: int) -> None:
    mean = Bucket.of({"w": low_rank(12, 8, rank, 5)})
    state = dict[str, Tensor]()
    DionUpdate(rank, momentum=0.0).direction(mean, mean, state, context())
    assert float(state["kept"].abs().max()) < 1e-12 * float(mean.flat.abs().max())


def test_through_factors_nothing_is_left_either() -> None:
    def of_rank_two(model: nn.Module, rank: int, step: int) -> float:
        mixed(model, rank, step)
        model.get_parameter("w").grad = low_rank(12, 8, 2, step)
        return 0.0

    ranks = make("dion(2, momentum=0.0)", 3, Matrix, plain)
    train(ranks, of_rank_two, 4)
    for r in ranks:
        (bucket,) = r.worker.buckets
        assert float(bucket.states["memory"]["residual"].abs().max()) < 1e-12
        assert float(bucket.states["update"]["kept"].abs().max()) < 1e-12


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_matrix_of_lower_rank_and_of_any_size_moves_along_its_own_directions_only(scale: float) -> None:
    """Columns beyond its rank are rounding, and would be stretched to length one."""
    given = low_rank(12, 8, 2, 7).float() * scale
    mean, state = Bucket.of({"w": given}), dict[str, Tensor]()
    found = DionUpdate(5).direction(mean, mean, state, context()).view(12, 8)
    assert found.isfinite().all()
    assert int((torch.linalg.svdvals(found) > 1e-3).sum()) == 2
    inside = torch.linalg.svd(given / scale)[0][:, :2]
    torch.testing.assert_close(inside @ (inside.t() @ found), found, rtol=1e-4, atol=1e-4)


def test_zeros_move_nothing_and_the_directions_before_them_stay() -> None:
    update, state = DionUpdate(3, momentum=0.0), dict[str, Tensor]()
    mean = Bucket.of({"w": low_rank(12, 8, 3, 7)})
    nothing = mean.like(torch.zeros_like(mean.flat))
    assert not update.direction(nothing, mean, state, context()).any()
    first = update.direction(mean, mean, state, context())
    before = state["q:w"]
    assert not update.direction(nothing, mean, state, context()).any()
    assert torch.equal(state["q:w"], before)
    assert state["q:w"].isfinite().all()
    assert first.any()


def test_a_step_that_is_not_finite_leaves_no_trace() -> None:
    ranks = make(FACTORS, 2, optimizer=plain)
    train(ranks, spoiled([(0, 3)], float("nan")), 5)
    assert [r.worker.record.skipped for r in ranks] == [1, 1]
    assert all(p.isfinite().all() for p in parameters(ranks))


def test_it_goes_on_from_a_file_as_if_nothing_had_been() -> None:
    ranks = make(FACTORS, 3, optimizer=plain)
    train(ranks, pull, 4)
    again = resumed(FACTORS, saved(ranks), optimizer=plain)
    for run in (ranks, again):
        train(run, pull, 4)
    assert bit_equal([*parameters(ranks), *parameters(again)])


def test_only_factors_and_vectors_travel() -> None:
    ranks = make("dion(2)", 2, lambda: nn.Linear(64, 32), plain)
    report = train(ranks, mixed, 3)
    (factors, dense) = (report.ledger.sent, 3 * 2 * 4 * (64 * 32 + 32))
    assert factors == 3 * 2 * 4 * (2 * (64 + 32) + 32)
    assert factors < dense / 9


def with_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (Matrix, sgd(0.02, 0.9), "with SGD: both add momentum"),
        (Matrix, with_adamw, "with AdamW: both add momentum"),
        (lambda: Flat(8), plain, "has no matrix"),
    ],
)
def test_what_cannot_be_right_is_refused_when_it_is_attached(model: Any, optimizer: Any, words: str) -> None:
    with pytest.raises(AttachError) as caught:
        make("allreduce(fp32()) + dion_update(2)", 2, model, optimizer)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dion(0)", "rank must be at least 1"),
        ("dion(4, momentum=1.0)", "dion_update: momentum must lie in [0, 1), got 1.0"),
        ("dion(4) + local_sgd(8)", "local_sgd(8) averages none: use every_step()"),
    ],
)
def test_what_cannot_be_right_is_refused_when_it_is_made(text: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.of(text)
    assert words in str(caught.value)


def test_a_step_inside_of_autocast_is_the_same() -> None:
    """Its products had half the bits there, and torch has no QR of those."""

    def stepped(inside: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with gossamer.attach(model, optimizer, FACTORS):
            for step in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 8), 1.0 + step)).square().sum().backward()
                with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                    optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, stepped(True), stepped(False)))
