"""A quorum over rounds on real processes: late learners hold up nobody, and all end with one model."""

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.loops import SMALL, attached, flat, learning, loss_of, same, simulated, trained
from tests.integrations.test_consensus import linear_loss, sgd
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer import checkpoint

pytestmark = pytest.mark.gang

STEPS = 9


def one_is_late(rank: int, size: int, recipe: str, slow: int) -> dict[str, Any]:
    """One rank does not end its first step before the others are done with all of theirs, which they take side by side; its
    lane is there from the forward pass on.
    """
    store = dist.distributed_c10d._get_default_store()

    def wait_for_the_others(step: int) -> None:
        wait_for(lambda: store.check([f"late/{step}/{r}" for r in range(size) if r != slow]))

    with attached(recipe, optimizer=sgd) as (model, optimizer, comm):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if rank == slow:
                wait_for_the_others(STEPS)
            optimizer.step()
            store.set(f"late/{step}/{rank}", "")
            wait_for_the_others(step)
        comm.check_sync()
        learner = comm.worker.live["learner"]
        accepted, rounds, steps = Counter(comm.worker.record.accepted), comm.worker.record.closed_steps, comm.step
        merged = sum(f.merged + f.steps for f in learner._fragments)
        comm.finish()
        for step in range(1, STEPS + 1):
            store.delete_key(f"late/{step}/{rank}")
        return {"accepted": accepted, "rounds": rounds, "steps": steps, "merged": merged, "end": flat(model)}


@pytest.mark.parametrize(
    "recipe",
    [
        "decoupled_diloco(3)" + SMALL,
        "async_diloco(3)" + SMALL,
        "topk(ratio=0.1) + quorum_rounds(3, quorum=3, overlap=0, late='drop', merge='radial')",
    ],
)
def test_nobody_waits_for_a_late_learner_and_all_end_with_one_model(gang4: Gang, recipe: str) -> None:
    outcomes = gang4.run(one_is_late, recipe, 2)
    for outcome in outcomes:
        assert outcome["steps"] == STEPS
        assert outcome["merged"] == STEPS or "drop" in recipe
        assert outcome["accepted"] == outcomes[0]["accepted"]
        assert same(outcome["end"], outcomes[0]["end"])
    # A round opens every three steps of somebody, and two of them have landed before the late one ends its first step.
    assert outcomes[0]["rounds"] >= 3
    assert outcomes[0]["accepted"][2] <= outcomes[0]["rounds"] - 2


def by_one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def one_is_done_early(rank: int, size: int) -> tuple[float, float]:
    """Rank 0 waits for the consensus while rank 1 trains through many rounds; each step moves the weight by one."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    with attached("allreduce + quorum_rounds(4, momentum=0.0, rate=1.0)", model, by_one) as (_, optimizer, comm):
        while comm.step < (80 if rank else 8):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            time.sleep(0.005)
        own = float(model.weight.detach())
        comm.finish()
        return own, float(model.weight.detach())


def test_who_was_done_early_gives_the_consensus_what_all_have_trained_since(gang2: Gang) -> None:
    (early, end), (late, other) = gang2.run(one_is_done_early)
    assert end == other
    assert late < 3 * early < 0
    assert abs(end - late) < 0.2 * abs(late - early)


def test_of_all_ranks_it_is_diloco_bit_for_bit(gang2: Gang) -> None:
    """Whoever is late is waited for, until it has taken as many steps."""
    rounds, delayed, diloco = (
        gang2.run(trained, f"scatter(qsgd(bits=4, bucket=16)) + {schedule}{SMALL}", 7)
        for schedule in (
            "quorum_rounds(3, quorum=2, overlap=0, least=3, weigh='equal')",
            "quorum_rounds(3, quorum=2, overlap=0, least=3, weigh='equal', delayed=0.0)",
            "slowmo(3, 0.9, 0.7, by_lr=False, nesterov=True)",
        )
    )
    for twins in rounds, delayed:
        assert all(same(a, b) for mine, theirs in zip(twins, diloco) for a, b in zip(mine, theirs))


def test_delayed_nesterov_is_that_of_the_simulator_bit_for_bit(gang2: Gang) -> None:
    recipe = (
        "scatter(qsgd(bits=4, bucket=16)) + quorum_rounds(3, quorum=2, least=3, weigh='equal', delayed=0.25)" + SMALL
    )
    real, virtual = gang2.run(trained, recipe, 10), simulated(recipe, 2, 10)
    for mine, twin in zip(real, virtual, strict=True):
        assert all(same(a, b) for a, b in zip(mine, twin, strict=True))
        assert not same(mine[0], mine[-1])


def halves(rank: int, size: int, recipe: str, folder: str, stops: bool) -> list[Any]:
    """A run that is saved in the midst of a round, and perhaps killed there."""
    out = list[Any]()

    def go(steps: int, fresh: bool, end: int) -> None:
        with attached(recipe, optimizer=sgd) as (model, optimizer, comm):
            if not fresh:
                checkpoint.load(comm, folder)
            while comm.step < end:
                optimizer.zero_grad()
                linear_loss(model, rank, comm.step + 1).backward()
                optimizer.step()
                if comm.step == steps:
                    checkpoint.save(comm, folder)
            comm.check_sync()
            out.append(flat(model))

    if stops:
        go(4, True, 4)
        go(0, False, 9)
    else:
        go(4, True, 9)
    return out


def test_a_run_that_is_killed_and_resumed_changes_no_bit(gang2: Gang, tmp_path: Any) -> None:
    """Each waits for the other, so that time has no say: saved when an average has come, and before it lands."""
    recipe = "topk(ratio=0.1) + quorum_rounds(3, quorum=2, overlap=2, least=3)" + SMALL
    killed = gang2.run(halves, recipe, str(tmp_path / "a"), True)
    whole = gang2.run(halves, recipe, str(tmp_path / "b"), False)
    assert all(same(a[-1], b[-1]) for a, b in zip(killed, whole))


def refusals(rank: int, size: int) -> list[str]:
    model, said = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), list[str]()
    for options in ({}, {"buffers": "average"}, {"find_unused_parameters": True, "buffers": "local"}):
        try:
            with attached("decoupled_diloco(3)", model=model, optimizer=sgd, **options):
                said.append("")
        except gossamer.GossamerError as error:
            said.append(str(error))
    return said


def test_what_needs_all_ranks_at_every_step_is_refused(gang2: Gang) -> None:
    for said in gang2.run(refusals):
        assert "pass buffers='local'" in said[0]
        assert "pass 'local'" in said[1]
        assert "needs all ranks at every step" in said[2]


def test_it_learns(gang2: Gang) -> None:
    losses = gang2.run(learning, "decoupled_diloco(4, momentum=0.5)")
    assert sum(run[-1] for run in losses) < 0.8 * sum(run[0] for run in losses)
