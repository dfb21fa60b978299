"""Backup workers on real processes: late gradients are dropped and reported, and the replicas stay equal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import marked
from tests.gang import Gang
from tests.integrations.loops import attached, flat, loss_of, same

pytestmark = pytest.mark.gang

STEPS = 8


def decaying(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Milestones:
    """What rank 0 has done, for a rank that is late on purpose: as late as it must be, on however slow a machine."""

    def __init__(self, rank: int) -> None:
        self._rank, self._store, self._done = rank, dist.distributed_c10d._get_default_store(), 0

    def reach(self, step: int) -> None:
        if self._rank == 0:
            for n in range(self._done + 1, step + 1):
                self._store.set(f"milestone/{n}", "")
            self._done = step

    def wait_for(self, step: int) -> None:
        """The exchanges up to this step are over then, on all ranks' lanes."""
        # A wait in the store would keep the lanes from asking it.
        marked.wait_for(lambda: self._store.check([f"milestone/{step}"]))

    def forget(self) -> None:
        if self._rank == 0:
            for n in range(1, self._done + 1):
                self._store.delete_key(f"milestone/{n}")


@contextmanager
def milestones(rank: int) -> Iterator[Milestones]:
    made = Milestones(rank)
    yield made
    dist.barrier()
    made.forget()


def straggling(rank: int, size: int, recipe: str, spoilt: int = 0) -> dict[str, Any]:
    """The last rank is late in two of its steps; a scheduler that counts calls runs on every rank."""
    told, seen, rates = list[int](), dict[int, torch.Tensor](), list[float]()
    clips = [0]
    late = {2: 4, 3: 7}  # in which turns, and what the others have done by then
    with milestones(rank) as others, attached(recipe, optimizer=decaying, on_late=told.append) as made:
        model, optimizer, comm = made

        def clip() -> None:
            clips[0] += 1
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)

        comm.before_step = clip
        optimizer.register_step_pre_hook(lambda o, *_: rates.append(o.param_groups[0]["lr"]))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        turns = 0
        while comm.step < STEPS:
            turns += 1
            optimizer.zero_grad()
            loss = loss_of(model, rank, comm.step + 1)
            if rank == size - 1 and turns in late:
                others.wait_for(late[turns])
            (loss * float("nan") if comm.step + 1 == spoilt else loss).backward()
            optimizer.step()
            scheduler.step()
            others.reach(comm.step)
            seen[comm.step] = flat(model)
        comm.check_sync()
        dist.barrier()
        return {
            "told": told,
            "dropped": comm.dropped,
            "seen": seen,
            "turns": turns,
            "rates": rates,
            "clips": clips[0],
            "metric": comm.metrics()["dropped_steps"],
            "accepted": dict(comm.worker.live["quorum"].accepted),
        }


@pytest.mark.parametrize("recipe", ["backup", "scatter(qsgd(bits=8)) + backup_workers()"])
def test_a_late_rank_is_dropped_told_and_catches_up(gang4: Gang, recipe: str) -> None:
    outcomes = gang4.run(straggling, recipe)
    late = outcomes[3]
    assert late["dropped"]
    for outcome in outcomes:
        assert outcome["told"] == outcome["dropped"]
        assert outcome["metric"] == len(outcome["dropped"])
        assert outcome["accepted"] == outcomes[0]["accepted"]
        assert all(len(ranks) == 3 for ranks in outcome["accepted"].values())
        assert all(outcome["accepted"][step].count(outcomes.index(outcome)) == 0 for step in outcome["dropped"])
        for step in outcome["seen"].keys() & outcomes[0]["seen"].keys():
            assert same(outcome["seen"][step], outcomes[0]["seen"][step])
        assert STEPS in outcome["seen"]
        assert outcome["clips"] == STEPS  # every update, missed or not, was clipped
        assert len(outcome["rates"]) == STEPS
    assert late["turns"] < STEPS


def test_all_ranks_step_with_one_rate_though_schedulers_lag(gang4: Gang) -> None:
    outcomes = gang4.run(straggling, "backup")
    assert all(outcome["rates"] == outcomes[0]["rates"] for outcome in outcomes)
    assert outcomes[3]["turns"] < STEPS


def test_an_update_that_is_not_finite_is_applied_by_nobody(gang4: Gang) -> None:
    outcomes = gang4.run(straggling, "backup", 3)
    assert outcomes[3]["dropped"]
    for outcome in outcomes:
        assert same(outcome["seen"][STEPS], outcomes[0]["seen"][STEPS])
        assert outcome["seen"][STEPS].isfinite().all()


def marching(rank: int, size: int, steps: int) -> list[int]:
    """The keys in the store at some steps; one rank after the other is late now and then."""
    keys = list[int]()
    with attached("backup") as (model, optimizer, comm):
        while comm.step < steps:
            step = comm.step + 1
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            if step % 20 == 5 * rank:
                time.sleep(0.02)
            loss.backward()
            optimizer.step()
            if rank == 0 and step >= 50 and step % 25 == 0:  # before, counters are kept that a late rank may ask for
                keys.append(dist.distributed_c10d._get_default_store().num_keys())
        dist.barrier()
    return keys


def test_the_store_does_not_grow_with_the_steps(gang4: Gang) -> None:
    """A key a step that stays would be 100 of them."""
    keys = gang4.run(marching, 150)[0]
    assert max(keys) - min(keys) <= 25  # a step's claims are five keys, and steps close while we count


def mixed(rank: int, size: int) -> str:
    from gossamer.core.errors import AttachError

    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3).double())
    with pytest.raises(AttachError) as caught, attached("backup(backups=0)", model):
        pass
    return str(caught.value)


def test_parameters_of_two_precisions_are_refused(gang2: Gang) -> None:
    assert all("the same dtype" in text for text in gang2.run(mixed))


def too_few(rank: int, size: int, recipe: str) -> str:
    from gossamer.core.errors import RecipeError

    with pytest.raises(RecipeError) as caught, attached(recipe):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("backups", "words"), [(1, "2 ranks leave one gradient"), (2, "2 ranks leave no gradient to wait for")]
)
def test_ranks_that_leave_no_mean_are_refused_at_attach(gang2: Gang, backups: int, words: str) -> None:
    assert all(words in text for text in gang2.run(too_few, f"backup({backups})"))


def patient(rank: int, size: int) -> tuple[list[int], list[float], torch.Tensor]:
    """Nobody is late by a million times what is usual."""
    with attached("allreduce(fp32()) + backup_workers(grace=1000000.0, limit=60.0)") as (model, optimizer, comm):
        while comm.step < STEPS:
            optimizer.zero_grad()
            loss_of(model, rank, comm.step + 1).backward()
            optimizer.step()
        dist.barrier()
        return comm.dropped, comm.acceptance, flat(model)


def test_grace_keeps_a_step_open_for_all(gang4: Gang) -> None:
    outcomes = gang4.run(patient)
    for dropped, acceptance, model in outcomes:
        assert dropped == []
        assert acceptance == [1.0] * 4
        assert same(model, outcomes[0][2])


def shrinking(rank: int, size: int) -> dict[str, Any]:
    """Nobody may be late, and the last rank is, in its second step: until the others have done four without it."""
    told, used = list[tuple[int, Any]](), dict[int, tuple[int, ...]]()
    recipe = "allreduce(fp32()) + backup_workers(backups=0, limit=0.2, on_exhausted='shrink')"
    with milestones(rank) as others, attached(recipe) as (model, optimizer, comm):
        comm._steps.meter.on_late = lambda step: told.append((step, comm.dropped_samples[step]))

        def before() -> None:
            used[len(used) + 1] = comm.accepted

        comm.before_step = before
        turns = 0
        while comm.step < STEPS:
            turns += 1
            optimizer.zero_grad()
            comm.samples(f"batch {turns}")
            loss = loss_of(model, rank, comm.step + 1)
            if rank == size - 1 and turns == 2:
                others.wait_for(4)
            loss.backward()
            optimizer.step()
            others.reach(comm.step)
        dist.barrier()
        drops = [(d.step, d.dropped) for d in comm.ledger.drops]
        return {"told": told, "drops": drops, "used": used, "model": flat(model), "shares": comm.acceptance}


def test_an_exhausted_step_shrinks_and_every_rank_knows_by_how_much(gang4: Gang) -> None:
    outcomes = gang4.run(shrinking)
    last, first = outcomes[-1], outcomes[0]
    assert all(3 not in first["used"][step] for step in (2, 3, 4))  # under load, others may be late as well
    assert (2, ["batch 2"]) in last["told"]
    assert last["told"] == last["drops"]
    assert first["shares"][3] <= 1 - 3 / STEPS
    for outcome in outcomes:
        assert same(outcome["model"], first["model"])
        assert outcome["used"] == first["used"]
        assert outcome["shares"] == first["shares"]
