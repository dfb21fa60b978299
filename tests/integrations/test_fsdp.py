"""Models that FSDP2 shards inside a replica train as dense ones do, and send only between replicas."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, SEED, same
from tests.integrations.sharded import adamw, dense, full, loss_of, mesh_of, sgd
from torch import Tensor, nn

import gossamer

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
STEPS = 6


def flat(model: nn.Module) -> Tensor:
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def over_shards(rank: int, size: int, recipe: str, kind: str, how: dict[str, Any]) -> list[Tensor]:
    mesh, out = mesh_of(2), list[Tensor]()
    with sharded.attached(recipe, mesh, OPTIMIZERS[kind], **how) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, rank // 2, step).backward()
            optimizer.step()
            out.append(flat(model))
        assert comm.step == STEPS
        comm.check_sync()
    return out


def over_whole_models(rank: int, size: int, recipe: str, kind: str) -> list[Tensor]:
    model, out = dense(), list[Tensor]()
    optimizer = OPTIMIZERS[kind](model)
    with gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            out.append(flat(model))
    return out


@pytest.mark.parametrize("how", [{}, {"one_dimension": True}, {"blocks": False}], ids=["2-D", "1-D", "root only"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_allreduce_is_bit_equal_to_dense(gang2: Gang, gang4: Gang, kind: str, how: dict[str, Any]) -> None:
    (wanted, _) = gang2.run(over_whole_models, "allreduce", kind)
    for run in gang4.run(over_shards, "allreduce", kind, how):
        assert all(same(a, b) for a, b in zip(run, wanted, strict=True))
