"""Weights and shares of replicas that FSDP2 shards: one for all ranks of a replica, or a model would be put together of two means."""

from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, SEED, same
from tests.integrations.sharded import cut, dense, full, loss_of, mesh_of, sgd
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import GossamerError

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]
STEPS = 5
WEIGHTS = (1.0, 3.0)  # of the replicas


def flat(model: nn.Module) -> Tensor:
    return torch.cat([full(p).reshape(-1) for p in model.parameters()])


def trained(model: nn.Module, replica: int, share: Any = None, **options: Any) -> tuple[Tensor, list[int]]:
    """A model after some steps, and the shares that were planned."""
    optimizer, shares = sgd(model), list[int]()
    with gossamer.attach(model, optimizer, "allreduce", seed=SEED, deadline=DEADLINE, **options) as comm:
        for step in range(1, STEPS + 1):
            if share is not None:
                shares.append(comm.share(12, seconds=share(step)))
            optimizer.zero_grad()
            loss_of(model, replica, step).backward()
            optimizer.step()
        comm.check_sync()
    return flat(model), shares


def whole(rank: int, size: int, shares: bool) -> tuple[Tensor, list[int]]:
    how = {"share": lambda step: WEIGHTS[1 - rank] * step} if shares else {"weight": WEIGHTS[rank]}
    return trained(dense(), rank, **how)


def shards(rank: int, size: int, shares: bool) -> tuple[Tensor, list[int]]:
    """The slow rank of a replica is its second in one and its first in the other; the fast one takes a tenth of the time."""
    replica, shard = divmod(rank, 2)
    slow = 1.0 if shard != replica else 0.1
    how = {"share": lambda step: slow * WEIGHTS[1 - replica] * step} if shares else {"weight": WEIGHTS[replica]}
    return trained(cut(dense(), mesh_of(2)), replica, **how)


@pytest.mark.parametrize("shares", [False, True], ids=["weight", "share"])
def test_replicas_are_weighed_as_whole_models_are(gang2: Gang, gang4: Gang, shares: bool) -> None:
    wanted = gang2.run(whole, shares)
    found = gang4.run(shards, shares)
    for rank, (model, planned) in enumerate(found):
        expected, as_planned = wanted[rank // 2]
        torch.testing.assert_close(model, expected, rtol=0, atol=1e-6)
        assert planned == as_planned
    if shares:
        assert found[0][1][-1] == 3
        assert found[2][1][-1] == 9
    (equal, _), _ = gang2.run(equally)
    assert not same(wanted[0][0], equal)


def equally(rank: int, size: int) -> tuple[Tensor, list[int]]:
    return trained(dense(), rank)


def refused(rank: int, size: int, what: str) -> str:
    mesh = mesh_of(2)
    given = {"weight": 1.0 + (rank == 3)} if what == "weight" else {}
    with pytest.raises(GossamerError) as caught, sharded.attached("allreduce", mesh, **given) as (_, _, comm):
        comm.share(12 + (rank == 3), seconds=1.0)
    return str(caught.value)


def test_ranks_of_a_replica_have_one_weight_and_name_one_number_of_samples(gang4: Gang) -> None:
    said = gang4.run(refused, "weight")
    for text in said[2:]:
        assert "the shards of a replica are not set up alike" in text
        assert "weight: 1.0 on rank(s) 0; 2.0 on rank(s) 1" in text
    assert all("cannot go on" in text for text in said[:2])
    said = gang4.run(refused, "share")
    for text in said[2:]:
        assert "comm.share(samples) differs between the ranks of a replica, from 12 to 13" in text
    assert all("rank 1 cannot go on: comm.share(samples) differs" in text for text in said[:2])
