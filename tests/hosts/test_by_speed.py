"""Local steps by speed on real processes: a slow one takes fewer, and all come to the end of a round."""

import time

import pytest
from tests.gang import Gang
from tests.hosts.loops import attached, flat, loss_of, same
from torch import Tensor

pytestmark = pytest.mark.gang

EVERY, ROUNDS = 4, 3
SLOW = 0.1  # seconds; a step of the others takes milliseconds, on a machine that is busy as well


def one_is_slow(rank: int, size: int, recipe: str) -> tuple[int, int, Tensor]:
    with attached(recipe) as (model, optimizer, comm):
        taken = 0
        while comm.step < EVERY * ROUNDS:
            optimizer.zero_grad()
            loss_of(model, rank, taken := taken + 1).backward()
            time.sleep(SLOW if rank == 1 else 0.0)
            optimizer.step()
        comm.check_sync()
        return taken, comm.step, flat(model)


def test_a_slow_rank_takes_fewer_steps_and_all_end_with_one_model(gang2: Gang) -> None:
    (fast, first, model), (slow, other, twin) = gang2.run(one_is_slow, "allreduce + by_speed(local_sgd(4))")
    assert (fast, first, other) == (EVERY * ROUNDS, EVERY * ROUNDS, EVERY * ROUNDS)
    assert slow < fast
    assert same(model, twin)


def shared(rank: int, size: int) -> tuple[list[int], Tensor]:
    """The rank that is slow takes a while for each of its samples."""
    shares = list[int]()
    with attached("allreduce") as (model, optimizer, comm):
        for step in range(1, 6):
            shares.append(comm.share(12))
            time.sleep(shares[-1] * (0.02 if rank == 1 else 0.002))
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        comm.check_sync()
        again = shares[-1]
    with attached("allreduce", weight=again) as (_, _, comm):
        assert comm.share(12) == again
    return shares, flat(model)


def test_shares_are_found_without_being_told(gang2: Gang) -> None:
    (fast, model), (slow, twin) = gang2.run(shared)
    assert (fast[:3], slow[:3]) == ([6] * 3, [6] * 3)
    assert fast[3] > slow[3]
    assert fast[-1] + slow[-1] == 12
    assert same(model, twin)
