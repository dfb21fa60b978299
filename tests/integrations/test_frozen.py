"""A rank that freezes, connections open and all: every other one raises in time, and says who it is that does not answer."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Call, at_once
from tests.integrations.loops import SMALL, attached, loss_of, small_step
from tests.marked import SLACK, wait_for

from gossamer.core.errors import PeerError
from gossamer.schedules.round_closer import RoundCloser

pytestmark = pytest.mark.gang

DEADLINE = 3.0


def process_of(rank: int, size: int) -> int:
    """Every rank is told the victim's process."""
    mine = torch.tensor([os.getpid()])
    everyone = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine)
    return int(everyone[rank])


def freezing(rank: int, size: int, recipe: str, victim: int) -> tuple[str, float]:
    """The victim is stopped in the middle of its backward pass; the other one, when it has noticed, puts an end to it."""
    frozen = process_of(victim, size)
    with attached(recipe, deadline=DEADLINE) as (model, optimizer, comm):

        def freeze(_: object) -> None:
            if rank == victim and comm.step >= 9:  # past the first requests, which are compared before they begin
                os.kill(os.getpid(), signal.SIGSTOP)

        model.get_parameter("matrix").register_hook(freeze)
        end = time.monotonic() + 50.0
        try:
            while time.monotonic() < end:
                began = time.monotonic()
                small_step(model, optimizer, comm, rank)
        except PeerError as error:
            return str(error), time.monotonic() - began
        finally:
            if rank != victim:
                os.kill(frozen, signal.SIGKILL)
        raise AssertionError("nobody noticed that a rank stands still")


def freezing_in_a_round(rank: int, size: int, recipe: str) -> tuple[str, float, int]:
    """Rank 1 closes a round that the other one is late for, and is stopped before it answers there. The late one has nothing
    to land, and no average to wait for.
    """
    frozen = process_of(1, size)
    if rank == 1:
        RoundCloser._average = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign,assignment]
    with attached(recipe, deadline=DEADLINE) as (model, optimizer, comm):
        try:
            while comm.step < 1000:
                began = time.monotonic()
                optimizer.zero_grad()
                loss_of(model, rank, comm.step + 1).backward()
                if rank == 0 and comm.step == 0:
                    wait_for(lambda: comm.worker.live["learner"]._closing.latest.closed)
                optimizer.step()
        except PeerError as error:
            return str(error), time.monotonic() - began, comm.step
        finally:
            if rank == 0:
                os.kill(frozen, signal.SIGKILL)
        raise AssertionError("nobody noticed that a rank stands still")


FROZEN = [("allreduce" + SMALL, 1), ("terngrad" + SMALL, 0), ("local_sgd(2)", 1), ("sgp" + SMALL, 0), ("ad_psgd", 1)]
LATE = "decoupled_diloco(4)"


@pytest.fixture(scope="module")
def noticed() -> Iterator[Callable[[Any], list[Any]]]:
    calls: dict[Any, Call] = {case: Call(freezing, case, lost=case[1:]) for case in FROZEN}
    calls[LATE] = Call(freezing_in_a_round, (LATE,), lost=(1,))
    with at_once(2, calls) as outcome_of:
        yield outcome_of


@pytest.mark.parametrize(("recipe", "victim"), FROZEN)
def test_the_other_rank_learns_in_time_who_is_frozen(
    noticed: Callable[[Any], list[Any]], recipe: str, victim: int
) -> None:
    other = 1 - victim
    text, waited = noticed((recipe, victim))[other]
    assert f"rank {other} of 2: step" in text
    # Rank 0 hosts the store: when it stands still, nobody can ask where the others are.
    assert ("No answer from rank 1:" if victim else "The store does not answer") in text
    assert waited < DEADLINE + 3.0 + SLACK  # of which 1.5 go by until it is clear who does not answer


def test_a_learner_that_is_late_does_not_train_on_alone(noticed: Callable[[Any], list[Any]]) -> None:
    text, waited, steps = noticed(LATE)[0]
    assert "rank 0 of 2: step 4" in text  # that of the round
    assert "No answer from rank 1:" in text
    assert steps == 7  # it waits in the last step of a second round
    assert waited < DEADLINE + 3.0 + SLACK
