"""What `attach` takes off: trainers' wrappers around models and optimizers; and FSDP1 inside of one, which it refuses."""

import pytest
import torch
from tests.gang import Gang
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import gossamer
from gossamer.core.errors import AttachError
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


def refused(rank: int, size: int) -> str:
    """As Fabric hands out a model that its FSDPStrategy has wrapped."""
    wrapped = _FabricModule(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    with pytest.raises(AttachError) as caught:
        gossamer.attach(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1), "topk")
    return str(caught.value)


@pytest.mark.gang
@pytest.mark.filterwarnings("ignore")  # of FSDP1 itself, which torch has deprecated
def test_fsdp1_inside_of_a_trainers_wrapper_is_refused(gang2: Gang) -> None:
    for said in gang2.run(refused):
        assert said.startswith(
            "this model is sharded by FullyShardedDataParallel, and gossamer averages whole parameters"
        )
