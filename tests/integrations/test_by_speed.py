"""Local steps by speed on real processes: a slow one takes fewer, and all come to the end of a round."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, loss_of, same
from torch import Tensor

from gossamer.core.errors import CheckpointError, GossamerError
from gossamer.integrations import Communicator, checkpoint

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


class Rotary(Awkward):
    """With a float buffer that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.linspace(0.1, 1.0, 8))


def one_is_slow_with_buffers(rank: int, size: int) -> tuple[int, Tensor]:
    with attached("allreduce + by_speed(local_sgd(4))", Rotary(), buffers="average") as (model, optimizer, comm):
        taken = 0
        while comm.step < EVERY * ROUNDS:
            optimizer.zero_grad()
            loss_of(model, rank, taken := taken + 1).backward()
            time.sleep(SLOW if rank == 1 else 0.0)
            optimizer.step()
        comm.check_sync()
        return taken, flat(model)


def test_ranks_that_take_unequal_steps_ask_for_changed_buffers_at_one_place(gang2: Gang) -> None:
    """Who takes fewer steps jumps to the last one of the round, and had not asked before it, as the others had."""
    (fast, model), (slow, twin) = gang2.run(one_is_slow_with_buffers)
    assert slow < fast
    assert same(model, twin)


def asked_too_early(rank: int, size: int, folder: str) -> list[tuple[int, bool, str]]:
    """What each rank is told by itself, at its own step, of what all would have to do together."""
    told = list[tuple[int, bool, str]]()
    with attached("allreduce + by_speed(local_sgd(4))") as (model, optimizer, comm):
        while comm.step < EVERY:
            optimizer.zero_grad()
            loss_of(model, rank, comm.step + 1).backward()
            optimizer.step()
            for ask in (comm.check_sync, lambda: checkpoint.save(comm, folder), lambda: comm.heterogeneity([])):
                if rank == 0 and not comm.ends_round:
                    with pytest.raises(GossamerError) as refused:
                        ask()
                    told.append((comm.step, isinstance(refused.value, CheckpointError), str(refused.value)))
        assert comm.ends_round
        comm.check_sync()
        checkpoint.save(comm, folder)
    return told


def test_within_a_round_what_needs_all_ranks_is_refused_by_the_one_that_asks(gang2: Gang, tmp_path: Path) -> None:
    told, nothing = gang2.run(asked_too_early, str(tmp_path / "run"))
    assert (len(told), nothing) == (3 * (EVERY - 1), [])
    for (step, of_checkpoints, words), name in zip(
        told, ["comm.check_sync()", "checkpoint.save", "comm.heterogeneity()"] * 3
    ):
        assert words.startswith(name)
        assert f"rank 0 is at step {step}, within a round of by_speed(local_sgd(4))" in words
        assert words.endswith("when a round has ended, `if comm.ends_round:`")
        assert of_checkpoints == (name == "checkpoint.save")


class Run(NamedTuple):
    """Batches a rank took by the ends of rounds, its model there, and what it saved after the second."""

    taken: list[int]
    models: list[Tensor]
    saved: dict[str, Any]


def killed_after_the_second_round(rank: int, size: int, recipe: str, folder: str) -> tuple[Run, Run]:
    """One run of four rounds, and one that takes up what it saved in its midst."""

    def go_on(model: Any, optimizer: Any, comm: Communicator, taken: int) -> Run:
        run = Run([taken], [flat(model)], comm.state_dict())
        while comm.step < EVERY * 4:
            optimizer.zero_grad()
            loss_of(model, rank, taken := taken + 1).backward()
            time.sleep(SLOW if rank == 1 else 0.0)
            optimizer.step()
            if comm.step % EVERY:
                continue
            comm.check_sync()
            run.taken.append(taken)
            run.models.append(flat(model))
            if comm.step == EVERY * 2:
                checkpoint.save(comm, folder, {"taken": taken})
                run.saved.update(comm.state_dict())
        return run

    with attached(recipe) as (model, optimizer, comm):
        whole = go_on(model, optimizer, comm, 0)
    with attached(recipe, seed=99) as (model, optimizer, comm):
        taken = checkpoint.load(comm, folder)["taken"]
        return whole, go_on(model, optimizer, comm, taken)


@pytest.mark.parametrize(
    "recipe",
    ["allreduce + by_speed(local_sgd(4))", "scatter(qsgd(bits=4, bucket=16)) + by_speed(slowmo(4), weigh='tokens')"],
)
def test_a_run_that_is_killed_and_resumed_takes_up_the_plan_it_had(gang2: Gang, recipe: str, tmp_path: Path) -> None:
    """Steps were timed anew, so that only the round that was planned before is bound to be the same: it is, to the bit."""
    runs = gang2.run(killed_after_the_second_round, recipe, str(tmp_path / "run"))
    for whole, resumed in runs:
        assert whole.saved.keys() == resumed.saved.keys()
        assert all(
            same(v, resumed.saved[k]) if isinstance(v, Tensor) else v == resumed.saved[k]
            for k, v in whole.saved.items()
        )
        assert resumed.taken[:2] == whole.taken[2:4]
        assert all(map(same, resumed.models[:2], whole.models[2:4]))
    (_, fast), (_, slow) = runs
    assert all(map(same, fast.models, slow.models))
    assert fast.taken == [EVERY * 2, EVERY * 3, EVERY * 4]
    rounds = [b - a for a, b in zip(slow.taken, slow.taken[1:])]
    assert max(rounds) < EVERY  # it stays slow, and is still known to be


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
