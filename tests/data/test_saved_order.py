"""An order under a communicator: shares cut its batches, and checkpoints keep its place, also for another number of ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import DEADLINE, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.core.errors import CheckpointError

ROWS = TensorDataset(torch.arange(100.0)[:, None])


def begun(recipe: str = "topk", seed: int = 3) -> tuple[Any, gossamer.data.Order]:
    torch.manual_seed(1)
    model = nn.Linear(1, 1)
    comm = gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=1e-5), recipe, seed=SEED, deadline=DEADLINE)
    return comm, gossamer.data.Order(len(ROWS), seed, samples=10, comm=comm)


def train(comm: Any, order: gossamer.data.Order, steps: int, seconds: float | None = None) -> list[list[int]]:
    """The samples of each of the epoch's next steps."""
    seen = list[list[int]]()
    for (x,) in order.over(DataLoader(ROWS, batch_sampler=order)):
        comm.optimizers[0].zero_grad()
        (comm.model(x).square().mean() * order.scale).backward()
        comm.optimizers[0].step()
        seen.append(x.flatten().int().tolist())
        if len(seen) == steps:
            break
        if seconds is not None:
            comm.share(10, seconds=seconds)
    return seen


def saves(rank: int, size: int, path: str) -> list[list[int]]:
    comm, order = begun()
    with comm:
        seen = train(comm, order, 4, seconds=1.0 + rank)  # rank 1 takes twice as long
        gossamer.checkpoint.save(comm, f"{path}/step4", {"note": 1}, order=order)
    return seen


@pytest.mark.gang
def test_shares_cut_the_batches_and_one_rank_goes_on_from_two(gang2: Gang, tmp_path: Path) -> None:
    ranks = gang2.run(saves, str(tmp_path))
    assert [[len(batch) for batch in batches] for batches in ranks] == [[5, 7, 7, 7], [5, 3, 3, 3]]
    comm, order = begun()
    with comm:
        resumed = gossamer.checkpoint.resume(comm, tmp_path, order=order)
        assert (resumed.extra, comm.step, order.taken, len(order)) == ({"note": 1}, 4, 40, 6)
        rest = train(comm, order, 6)
        assert order.epoch == 1
    assert Counter(n for batches in [*ranks, rest] for batch in batches for n in batch) == Counter(range(100))


def test_a_checkpoint_without_an_order_says_so(tmp_path: Path) -> None:
    comm, order = begun()
    with comm:
        gossamer.checkpoint.save(comm, tmp_path / "step0")
        with pytest.raises(
            CheckpointError, match=r"step0 was saved without an order: call save\(..., order=order\) too"
        ):
            gossamer.checkpoint.load(comm, tmp_path / "step0", order=order)


def test_an_order_of_another_seed_changes_nothing(tmp_path: Path) -> None:
    comm, order = begun()
    with comm:
        train(comm, order, 2)
        gossamer.checkpoint.save(comm, tmp_path / "step2", order=order)
    comm, order = begun(seed=4)
    with comm:
        with pytest.raises(
            CheckpointError, match="is of 100 samples with seed 3, and this one of 100 samples with seed 4"
        ):
            gossamer.checkpoint.resume(comm, tmp_path, order=order)
        assert (comm.step, order.taken) == (0, 0)


def test_a_step_of_several_batches_is_used_when_it_is_done() -> None:
    comm, order = begun("minibatch(2)")
    with comm:
        assert len(order) == 10
        for number, (x,) in enumerate(order.over(DataLoader(ROWS, batch_sampler=order))):
            with comm.accumulating() as last:
                comm.model(x).square().mean().backward()
            if last:
                comm.optimizers[0].step()
                assert order.taken == 10 * (number + 1)
        assert order.epoch == 1
