"""Rounds and gossip between three replicas of two shards go as between three whole models: the shards decide together."""

from collections.abc import Iterator

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED
from tests.integrations.sharded import cut, dense, full, loss_of, mesh_of, sgd
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import AttachError

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
STEPS = 8
# Uncompressed, so that what a rank sends does not depend on how the model is cut.
RECIPES = [
    "local_sgd(2)",
    "slowmo(2)",
    "allreduce + slowmo(2, guard=edit_guard(warmup=1, z=0.5))",  # leaves replicas out
    "allreduce + slowmo(2, guard=edit_guard(clip=0.01))",
    "allreduce + noloco(2)",  # random pairs
    "sgp",
    "d_psgd",
    "des_loc",
]


@pytest.fixture(scope="module")
def gang6() -> Iterator[Gang]:
    gang = Gang(6)
    yield gang
    gang.close()


def trained(model: nn.Module, replica: int, recipe: str) -> Tensor:
    """All replicas' models in the end, each in a row; the third has larger gradients."""
    optimizer = sgd(model)
    with gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            (loss_of(model, replica, step) * (3.0 if replica == 2 else 1.0)).backward()
            optimizer.step()
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def whole(rank: int, size: int, recipe: str) -> Tensor:
    return trained(dense(), rank, recipe)


def shards(rank: int, size: int, recipe: str) -> Tensor:
    return trained(cut(dense(), mesh_of(2)), rank // 2, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_replica_ends_where_a_whole_model_does(gang3: Gang, gang6: Gang, recipe: str) -> None:
    wanted = gang3.run(whole, recipe)
    for rank, model in enumerate(gang6.run(shards, recipe)):
        torch.testing.assert_close(model, wanted[rank // 2], rtol=0, atol=1e-6)


def by_speed(rank: int, size: int) -> str:
    model = cut(dense(), mesh_of(2))
    with pytest.raises(AttachError) as caught:
        gossamer.attach(model, sgd(model), "allreduce + by_speed(local_sgd(4))", deadline=DEADLINE)
    return str(caught.value)


def test_rounds_by_each_ranks_own_speed_are_refused(gang4: Gang) -> None:
    """The ranks of a replica would take unlike numbers of steps, and FSDP2 would wait for ever."""
    for said in gang4.run(by_speed):
        assert "each shard of a replica would decide for itself which round it is in" in said
