"""AD-PSGD on real processes: each rank at its own pace, and one model in the end."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, learning, same
from tests.integrations.test_consensus import linear_loss, sgd
from tests.marked import wait_for
from torch import Tensor, nn

import gossamer
from gossamer import checkpoint
from gossamer.core.errors import CheckpointError

pytestmark = pytest.mark.gang

STEPS = 8


def at_their_own_pace(rank: int, size: int, recipe: str, slow: int) -> dict[str, Any]:
    """One rank does not begin before the others are done; gradients do not depend on the model, so that the mean is known."""
    store = dist.distributed_c10d._get_default_store()
    with attached(recipe, optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            if rank == slow:
                wait_for(lambda: store.check([f"done/{r}" for r in range(size) if r != slow]))
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        store.set(f"done/{rank}", "")
        with comm.consensus():
            agreed = flat(model)
        own, steps = flat(model), comm.step
        store.delete_key(f"done/{rank}")
        optimizer.zero_grad()
        linear_loss(model, rank, STEPS + 1).backward()
        optimizer.step()
        comm.check_sync()
        comm.finish()
        ages = comm.staleness, comm.metrics().get("staleness"), [a.age for a in comm.ledger.ages]
        return {
            "agreed": agreed,
            "own": own,
            "end": flat(model),
            "steps": steps,
            "sent": comm.ledger.sent,
            "ages": ages,
        }


def plain(rank: int, size: int, steps: int) -> Tensor:
    with attached("gather(fp32())", optimizer=sgd) as (model, optimizer, _):
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        return flat(model)


@pytest.mark.parametrize(("recipe", "slow"), [("ad_psgd" + SMALL, 0), ("ad_psgd(topology=two_way(ring()))", 3)])
def test_a_run_ends_with_the_mean_of_all_models_and_nobody_waits(gang4: Gang, recipe: str, slow: int) -> None:
    outcomes = gang4.run(at_their_own_pace, recipe, slow)
    exact, after = gang4.run(plain, STEPS)[0], gang4.run(plain, STEPS + 1)[0]
    for outcome in outcomes:
        assert outcome["steps"] == STEPS
        assert same(outcome["agreed"], outcomes[0]["agreed"])
        assert same(outcome["end"], outcomes[0]["end"])
        torch.testing.assert_close(outcome["agreed"], exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(outcome["end"], after, rtol=1e-5, atol=1e-5)
        assert outcome["sent"] > 0
    for rank, (by_age, mean, each) in enumerate(outcome["ages"] for outcome in outcomes):
        assert bool(by_age) == (rank % 2 == 0)  # of those who ask
        assert sum(by_age.values()) == len(each)
        assert not each or (min(each) >= 1 and mean == pytest.approx(sum(each) / len(each)))
    assert not same(outcomes[0]["own"], outcomes[1]["own"])


def saving(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Save at one step, go on; a second run begins where it was saved, with all that was owed."""
    with attached("ad_psgd", optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, 5):
            optimizer.zero_grad()
            linear_loss(model, rank, step).backward()
            optimizer.step()
        checkpoint.save(comm, folder)
        with comm.consensus():
            before = flat(model)
    with attached("ad_psgd", optimizer=sgd) as (model, optimizer, comm):
        checkpoint.load(comm, folder)
        with comm.consensus():
            loaded = flat(model)
        step = comm.step
        optimizer.zero_grad()
        linear_loss(model, rank, 5).backward()
        optimizer.step()
        try:
            comm.load_state_dict(comm.state_dict())
        except CheckpointError as error:
            refused = str(error)
        else:
            refused = ""
        comm.finish()
        return {"before": before, "loaded": loaded, "step": step, "end": flat(model), "refused": refused}


def test_what_is_saved_together_is_taken_up_together(gang4: Gang, tmp_path: Any) -> None:
    outcomes = gang4.run(saving, str(tmp_path / "run"))
    exact = gang4.run(plain, 5)[0]
    for outcome in outcomes:
        assert outcome["step"] == 4
        torch.testing.assert_close(outcome["loaded"], outcome["before"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(outcome["end"], exact, rtol=1e-5, atol=1e-5)
        assert "before the first step" in outcome["refused"]


def frozen_buffers(rank: int, size: int) -> list[str]:
    """What needs all ranks at every step is refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    said = list[str]()
    for options in (
        {},
        {"buffers": "average"},
        {"find_unused_parameters": True, "buffers": "local"},
        {"weight": 1.0 + rank, "buffers": "local"},
    ):
        try:
            with attached("ad_psgd", model=model, optimizer=sgd, **options):
                said.append("")
        except gossamer.GossamerError as error:
            said.append(str(error))
    return said


def test_what_needs_all_ranks_at_every_step_is_refused(gang4: Gang) -> None:
    for said in gang4.run(frozen_buffers):
        assert "pass buffers='local'" in said[0]
        assert "pass 'local'" in said[1]
        assert "needs all ranks at every step" in said[2]
        assert "weight" in said[3]


def test_it_learns(gang4: Gang) -> None:
    losses = gang4.run(learning, "ad_psgd")
    assert sum(run[-1] for run in losses) < 0.8 * sum(run[0] for run in losses)
