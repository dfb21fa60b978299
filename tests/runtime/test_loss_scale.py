"""The worker follows the loss scale, so that memories need not know of it."""

import pytest
import torch
from tests.runtime.gym import Replica, bit_equal, make, parameters, pull, resumed, same_memory, saved, train

RECIPES = [
    "topk(ratio=0.1)",
    "diana(bits=4, bucket=16, momentum=0.5)",
    "scatter(topk(ratio=0.2)) + error_feedback()",
    "scatter(topk(ratio=0.2)) + error_feedback(units='update')",
    "topk(ratio=0.1) + rule('ndim < 2', gather(topk()), error_feedback(units='update'))",
]


def under(scale: float, ranks: list[Replica], steps: int = 1) -> None:
    """Steps under a loss scaler: gradients arrive multiplied, and the optimizer takes them divided."""

    def backward(model: torch.nn.Module, rank: int, step: int) -> float:
        loss = pull(model, rank, step)
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * scale
        return loss

    for r in ranks:
        r.worker.scale = scale
        r.optimizer.param_groups[0]["lr"] = 0.05 / scale  # plain SGD: as dividing gradients
    train(ranks, backward, steps)


def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_training_is_the_same_under_any_scale(recipe: str) -> None:
    one, many = make(recipe, 2, optimizer=plain), make(recipe, 2, optimizer=plain)
    for scale in (1.0, 1024.0, 64.0, 64.0, 2.0**20):
        under(1.0, one)
        under(scale, many)
    assert bit_equal([parameters(one)[0], parameters(many)[0]])
    assert one[0].worker.residual_norm() == many[0].worker.residual_norm()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_one_scale_goes_on_under_another(recipe: str) -> None:
    ranks = make(recipe, 2, optimizer=plain)
    under(1024.0, ranks, steps=3)
    files = saved(ranks)
    again = resumed(recipe, files, optimizer=plain)
    for run in (ranks, again):
        under(32.0, run, steps=2)
    assert bit_equal([*parameters(ranks), *parameters(again)])


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_a_scale_that_is_no_scale_spoils_no_memory(scale: float) -> None:
    ranks, others = make("topk(ratio=0.1)", 2, optimizer=plain), make("topk(ratio=0.1)", 2, optimizer=plain)
    for run in (ranks, others):
        under(8.0, run, steps=2)
    for r in ranks:
        r.worker.scale = scale
        r.worker.averaging.program(0, torch.zeros(r.worker.buckets[0].layout.numel))
        kept, before = r.worker.buckets[0].states["memory"], others[r.worker.rank].worker.buckets[0].states["memory"]
        assert same_memory(kept, before)
        assert r.worker.averaging.unit == 8.0
