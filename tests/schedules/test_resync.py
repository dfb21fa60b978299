"""`resync` averages models beside gradients, and only the latter are for a controller."""

from functools import partial

import torch
from tests.runtime.gym import Flat, make, sgd, train
from torch import nn


def steady(model: nn.Module, rank: int, step: int) -> float:
    """The same gradient at every step, much shorter than the model."""
    x = model.get_parameter("x")
    x.grad = torch.full_like(x, 0.1)
    return 0.0


def test_a_controller_takes_no_average_of_models_for_gradients() -> None:
    """Gradients never change, so that from the second step on the harsh exchange is right."""
    harsh = "accordion(allreduce(fp32()), allreduce(bf16()), 1, interval=1)"
    ranks = make(f"allreduce(fp32()) + resync(1) + {harsh}", 2, partial(Flat, dtype=torch.float32), sgd(0.01, 0.0))
    for step in range(1, 6):
        train(ranks, steady, 1)
        assert all(bool(r.worker.recipe.routes) == (step >= 2) for r in ranks)
