"""Collectives of the loop's own, between steps whose averages are on their way."""

import time

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, same, small_step
from torch import Tensor

from gossamer.core.errors import AttachError

pytestmark = pytest.mark.gang


def trained(rank: int, size: int, recipe: str, quiet: bool) -> tuple[Tensor, list[bool]]:
    """A loop that adds up its losses at every step; one rank is always late."""
    waited = list[bool]()
    with attached(recipe) as (model, optimizer, comm):
        for _ in range(5):
            if quiet and rank == 1:
                time.sleep(0.02)
            small_step(model, optimizer, comm, rank)
            if quiet:
                sending = comm.worker.is_sending()
                comm.quiet()
                requests = comm.ledger.requests
                dist.all_reduce(torch.ones(1))
                waited.append(sending and requests == comm.ledger.requests and bool(comm.worker.in_flight.landing()))
        return flat(model), waited


@pytest.mark.parametrize("recipe", ["overlap_local_sgd(2)" + SMALL, "osgp", "terngrad"])
def test_a_quiet_lane_has_nothing_on_its_way_and_changes_nothing(gang2: Gang, recipe: str) -> None:
    plain, quiet = gang2.run(trained, recipe, False), gang2.run(trained, recipe, True)
    for (model, _), (other, waited) in zip(plain, quiet):
        assert same(model, other)
        assert any(waited) == (recipe.startswith("overlap"))


def never(rank: int, size: int) -> str:
    with attached("backup(backups=1)") as (_, _, comm), pytest.raises(AttachError) as refused:
        comm.quiet()
    return str(refused.value)


def test_under_backup_workers_no_moment_is_quiet(gang4: Gang) -> None:
    assert all("new_group(backend='gloo')" in text for text in gang4.run(never))
