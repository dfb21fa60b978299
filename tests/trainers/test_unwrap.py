"""What `attach` takes off: trainers' wrappers around models and optimizers."""

import torch
from torch import nn

from gossamer.integrations.checks.wrappers import model_inside, optimizer_inside


class _FabricModule(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self._forward_module = inside


class LightningOptimizer:
    """Takes the class of what it wraps as a second base, as Lightning's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Lightning" + type(optimizer).__name__, (type(self), type(optimizer)), {})


def test_wrappers_in_wrappers_are_taken_off() -> None:
    model = nn.Linear(2, 1)
    assert model_inside(_FabricModule(_FabricModule(model))) is model
    assert model_inside(model) is model
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    assert optimizer_inside(LightningOptimizer(inner)) is inner
    assert optimizer_inside(inner) is inner
