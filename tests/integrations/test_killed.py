"""Any rank may die at any moment: every other one raises a clear error within the deadline, and can leave."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.gang import Call, Gang, at_once
from tests.integrations.loops import SMALL, attached, loss_of, small_step
from tests.marked import SLACK

import gossamer
from gossamer.core.errors import PeerError

pytestmark = pytest.mark.gang

DEADLINE = 5.0


def dying(rank: int, size: int, recipe: str, victim: int) -> tuple[str, float, float]:
    """The victim is killed in the middle of its backward pass, when other gradients are on their way."""
    with attached(recipe, deadline=DEADLINE) as (model, optimizer, comm):

        def die(_: object) -> None:
            if rank == victim and comm.step >= 9:  # past the first requests, which are compared before they begin
                os.kill(os.getpid(), signal.SIGKILL)

        model.get_parameter("matrix").register_hook(die)
        while comm.step < 1000:
            began = time.monotonic()
            try:
                small_step(model, optimizer, comm, rank)
            except PeerError as error:
                noticed = time.monotonic()
                comm.detach()
                return str(error), noticed - began, time.monotonic() - noticed
        raise AssertionError("nobody noticed that a rank is gone")


DEATHS = [
    *(("allreduce" + SMALL, victim) for victim in range(3)),
    ("terngrad" + SMALL, 1),
    ("local_sgd(2)" + SMALL, 2),
    ("sgp" + SMALL, 0),
    ("sgp" + SMALL, 1),
    ("backup", 0),
    ("backup", 2),
]


@pytest.fixture(scope="module")
def survived() -> Iterator[Callable[[Any], list[Any]]]:
    with at_once(3, {death: Call(dying, death, lost=death[1:]) for death in DEATHS}) as outcome_of:
        yield outcome_of


@pytest.mark.parametrize(("recipe", "victim"), DEATHS)
def test_every_survivor_learns_of_a_death_in_time(
    survived: Callable[[Any], list[Any]], recipe: str, victim: int
) -> None:
    for rank, outcome in enumerate(survived((recipe, victim))):
        if rank != victim:
            text, waited, leaving = outcome
            assert f"rank {rank} of 3" in text
            # Rank 0 hosts the store: with it gone nobody can ask where the others are.
            assert re.search(
                rf"No answer from ranks? [^:]*\b{victim}\b" if victim else "The store does not answer", text
            ), text
            assert waited < DEADLINE + 3.0 + SLACK
            assert leaving < 3.0 + SLACK


def dying_under_ddp(rank: int, size: int, victim: int) -> tuple[str, float]:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(17, 7))
    hook = gossamer.ddp.register(model, "terngrad", deadline=DEADLINE)

    def die(_: object) -> None:
        if rank == victim and hook.step >= 9:
            os.kill(os.getpid(), signal.SIGKILL)

    model.module.weight.register_hook(die)
    while hook.step < 1000:
        model.zero_grad()
        began = time.monotonic()
        try:
            loss_of(model, rank, hook.step + 1).backward()
        except PeerError as error:
            waited = time.monotonic() - began
            hook.close()
            return str(error), waited
    raise AssertionError("nobody noticed that a rank is gone")


def test_backward_under_ddp_ends_with_the_error_too() -> None:
    gang = Gang(3)
    try:
        outcomes = gang.run(dying_under_ddp, 1, lost=[1], timeout=30.0)
    finally:
        gang.close()
    for rank in (0, 2):
        text, waited = outcomes[rank]
        assert f"rank {rank} of 3" in text
        assert "No answer from rank 1" in text
        assert waited < DEADLINE + 3.0 + SLACK
