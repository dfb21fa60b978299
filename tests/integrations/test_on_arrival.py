"""Asynchronous SGD on real processes: no step is lost, nobody waits for another's, and a saved run is taken up."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import Awkward, attached, flat, learning, same
from tests.integrations.test_consensus import linear_loss
from tests.marked import wait_for
from torch import Tensor, nn

import gossamer
from gossamer import checkpoint
from gossamer.core.errors import CheckpointError

pytestmark = pytest.mark.gang

STEPS = 6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    linear_loss(model, rank, step).backward()
    optimizer.step()


def at_their_own_pace(rank: int, size: int, slow: int) -> dict[str, Any]:
    """One rank does not begin before the others are done; gradients do not depend on the model, so that the end is known."""
    store = dist.distributed_c10d._get_default_store()
    with attached("async_sgd", optimizer=sgd) as (model, optimizer, comm):
        start = flat(model)
        for step in range(1, STEPS + 1):
            if rank == slow:
                wait_for(lambda: store.check([f"done/{r}" for r in range(size) if r != slow]))
            step_of(model, optimizer, rank, step)
        store.set(f"done/{rank}", "")
        with comm.consensus():
            agreed = flat(model)
        store.delete_key(f"done/{rank}")
        step_of(model, optimizer, rank, STEPS + 1)
        comm.check_sync()
        comm.finish()
        ages, mean = comm.staleness, comm.metrics()["staleness"]
        return {
            "start": start,
            "agreed": agreed,
            "end": flat(model),
            "ages": ages,
            "mean": mean,
            "sent": comm.ledger.sent,
        }


def moved(rank: int, size: int, steps: int) -> Tensor:
    """How far this rank's steps go, of which none depends on where it is."""
    model = Awkward()
    optimizer, start = sgd(model), flat(model)
    for step in range(1, steps + 1):
        step_of(model, optimizer, rank, step)
    return flat(model) - start


def test_every_step_of_every_rank_counts_and_nobody_waits_for_the_slowest(gang4: Gang) -> None:
    slow = 0  # the last one keeps the model, and answers from its first forward on
    outcomes = gang4.run(at_their_own_pace, slow)
    until, after = (sum(gang4.run(moved, n), torch.zeros(())) for n in (STEPS, STEPS + 1))
    for outcome in outcomes:
        assert same(outcome["agreed"], outcomes[0]["agreed"])
        assert same(outcome["end"], outcomes[0]["end"])
        torch.testing.assert_close(outcome["agreed"], outcome["start"] + until, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outcome["end"], outcome["start"] + after, rtol=1e-5, atol=1e-5)
        assert sum(outcome["ages"].values()) == STEPS + 1
        assert outcome["mean"] == pytest.approx(sum(a * n for a, n in outcome["ages"].items()) / (STEPS + 1))
    assert max(outcomes[slow]["ages"]) >= 3 * STEPS  # all that the others did meanwhile
    d = outcomes[0]["start"].numel()
    for outcome in outcomes[:3]:
        assert outcome["sent"] >= (STEPS + 1) * (4 * d + 8)


def saving(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Save at one step, go on; a second run begins where it was saved."""
    with attached("async_sgd", optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, 5):
            step_of(model, optimizer, rank, step)
        checkpoint.save(comm, folder)
        own = flat(model)
        with comm.consensus():
            before = flat(model)
    with attached("async_sgd", optimizer=sgd) as (model, optimizer, comm):
        checkpoint.load(comm, folder)
        back = flat(model)
        with comm.consensus():
            loaded = flat(model)
        number = comm.step
        step_of(model, optimizer, rank, 5)
        with pytest.raises(CheckpointError, match="before the first step"):
            comm.load_state_dict(comm.state_dict())
        comm.finish()
        return {"own": own, "back": back, "before": before, "loaded": loaded, "step": number, "end": flat(model)}


def test_what_is_saved_together_is_taken_up_together(gang4: Gang, tmp_path: Any) -> None:
    """Bit for bit: each rank's model, which may be older, and the server's."""
    outcomes = gang4.run(saving, str(tmp_path / "run"))
    fifth = sum(gang4.run(moved, 5), torch.zeros(())) - sum(gang4.run(moved, 4), torch.zeros(()))
    for outcome in outcomes:
        assert outcome["step"] == 4
        assert same(outcome["back"], outcome["own"])
        assert same(outcome["loaded"], outcome["before"])
        torch.testing.assert_close(outcome["end"], outcome["before"] + fifth, rtol=1e-5, atol=1e-5)


def refused(rank: int, size: int) -> list[str]:
    model, said = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), list[str]()
    for options in (
        {},
        {"buffers": "average"},
        {"find_unused_parameters": True, "buffers": "local"},
        {"weight": 1.0 + rank, "buffers": "local"},
        {"nodes": 2, "buffers": "local"},
    ):
        with (
            pytest.raises(gossamer.GossamerError) as caught,
            attached("async_sgd", model=model, optimizer=sgd, **options),
        ):
            pass
        said.append(str(caught.value))
    return said


def test_what_needs_all_ranks_at_every_step_is_refused(gang4: Gang) -> None:
    for said in gang4.run(refused):
        assert "pass buffers='local'" in said[0]
        assert "pass 'local'" in said[1]
        assert "needs all ranks at every step" in said[2]
        assert "weight" in said[3]
        assert "leave the nodes out" in said[4]


def slow(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.005)


def test_it_learns(gang4: Gang) -> None:
    """At a rate for steps that count in full, each up to any number of steps old: how many depends on the machine's load."""
    losses = gang4.run(learning, "async_sgd(by_staleness=True)", slow)
    assert sum(run[-1] for run in losses) < 0.8 * sum(run[0] for run in losses)
