"""Ranks that count differently: the mean of unequal batches, models and buffers; and the exact average at the end."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, data, flat, same
from torch import Tensor, nn

from gossamer.core.errors import GossamerError

pytestmark = pytest.mark.gang
ROWS, STEPS = (1, 5), 4


def rows(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return data(rank, step, ROWS[rank], torch.float64)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 2.0)
    optimizer.step()


def weighted(rank: int, size: int, recipe: str, weight: float) -> tuple[Tensor, Tensor]:
    """The model before the end, and the one that is kept."""
    model = Awkward(torch.float64)
    with attached(recipe, model, nesterov, weight=weight) as (_, optimizer, comm):
        for step in range(1, STEPS + 1):
            step_on(model, optimizer, *rows(rank, step))
        own = flat(model)
        comm.finish()
    return own, flat(model)


@pytest.mark.parametrize("recipe", ["allreduce", "scatter(fp32())", "gather(topk(ratio=1.0)) + error_feedback()"])
def test_unequal_batches_average_to_the_gradient_of_all_their_rows(gang2: Gang, recipe: str) -> None:
    alone = Awkward(torch.float64)
    optimizer = nesterov(alone)
    for step in range(1, STEPS + 1):
        pairs = [rows(rank, step) for rank in range(2)]
        step_on(alone, optimizer, *(torch.cat([pair[i] for pair in pairs]) for i in range(2)))
    for own, kept in gang2.run(weighted_by_rows, recipe):
        exact = 1e-7 if "topk" in recipe else 1e-12  # whose values travel as float32
        torch.testing.assert_close(own, flat(alone), rtol=exact, atol=exact)
        assert same(kept, own)


def weighted_by_rows(rank: int, size: int, recipe: str) -> tuple[Tensor, Tensor]:
    return weighted(rank, size, recipe, float(ROWS[rank]))


def test_in_the_midst_of_a_round_the_weighted_mean_of_the_models_is_kept(gang2: Gang) -> None:
    (first, kept), (second, other) = gang2.run(weighted_by_rows, "local_sgd(3)")
    torch.testing.assert_close(kept, (first * 1 + second * 5) / 6, rtol=1e-12, atol=1e-14)
    assert same(kept, other)
    assert not same(first, second)


def test_equal_weights_change_no_bit(gang2: Gang) -> None:
    for recipe in ("qsgd", "local_sgd(2)"):
        plain, threes = (gang2.run(weighted, recipe, weight)[0][1] for weight in (1.0, 3.0))
        assert same(plain, threes)


def counted(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Running statistics, at the end of a round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    plain = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached("local_sgd(1)", model, lambda _: plain, weight=1.0 + 2 * rank, buffers="average") as (
        _,
        optimizer,
        comm,
    ):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
        optimizer.zero_grad()
        model(x).mean().backward()
        own = 0.1 * model[0](x).mean(0).detach()
        optimizer.step()
        comm.check_sync()
        return own, model.get_buffer("1.running_mean").clone()


def test_running_statistics_are_weighted_too(gang2: Gang) -> None:
    (first, shared), (second, other) = gang2.run(counted)
    assert same(shared, other)
    torch.testing.assert_close(shared, (first + 3 * second) / 4)


def refused(rank: int, size: int, recipe: str, weights: tuple[Any, ...]) -> str:
    with pytest.raises(GossamerError) as caught, attached(recipe, weight=weights[rank]):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "weights", "words"),
    [
        ("sgp", (1.0, 2.0), "end at their plain mean"),
        ("slowmo_sgp(4)", (1.0, 2.0), "local_sgd or slowmo, without inner"),
        ("gossip_pga", (1.0, 2.0), "end at their plain mean"),
        ("allreduce + quorum_rounds(4, weigh='equal')", (1.0, 2.0), "with equal weights"),
        ("allreduce(fp32()) + backup_workers(backups=0)", (1.0, 2.0), "each step waits for other ranks"),
        ("local_gradients", (1.0, 2.0), "its own gradient whole"),
        ("accordion(2)", (1.0, 2.0), "equal batches"),
        ("signsgd", (1.0, 2.0), "a vote does not depend on the weight"),
        ("allreduce", (1.0, -2.0), "weight must be a number of 0 or more"),
        ("allreduce", (0.0, 0.0), "nothing to average"),
    ],
)
def test_what_cannot_be_weighted_is_refused_on_all_ranks(
    gang2: Gang, recipe: str, weights: tuple[Any, ...], words: str
) -> None:
    assert all(words in text for text in gang2.run(refused, recipe, weights))
