"""Which rows of the training data a rank sees at a step: pure arithmetic, the same on every rank."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gossamer.bench.workloads.errors import WorkloadError

Batch = tuple[Tensor, ...]  # tensors that all have one row per sample


class Data(NamedTuple):
    """Everything a workload trains and is judged on."""

    train: Batch
    held: Batch  # never trained on
    groups: Tensor  # of each training row: its label, topic, file ...


class BatchOf(NamedTuple):
    """Where in the training run a batch is, and whose it is."""

    step: int
    rank: int
    size: int


def iid(rows: int, batch: int, at: BatchOf, seed: int) -> Tensor:
    """All ranks share one shuffle of all rows; within an epoch no row is seen twice.

    >>> [iid(8, 2, BatchOf(step=0, rank=r, size=2), seed=0).tolist() for r in (0, 1)]
    [[4, 0], [7, 3]]
    """
    steps = _steps(rows, batch * at.size, at)
    order = _shuffle(rows, seed, at.step // steps)
    start = (at.step % steps * at.size + at.rank) * batch
    return order[start : start + batch]


def grouped(groups: Tensor, batch: int, at: BatchOf, seed: int) -> Tensor:
    """Rows sorted by group and cut into equal runs, one a rank: each rank knows few groups, and shuffles its own.

    >>> labels = torch.tensor([0, 1, 0, 1])
    >>> [grouped(labels, 2, BatchOf(step=0, rank=r, size=2), seed=0).tolist() for r in (0, 1)]
    [[2, 0], [1, 3]]
    """
    share = len(groups) // at.size
    steps = _steps(share, batch, at)
    mine = _by_group(groups)[at.rank * share : (at.rank + 1) * share]
    order = _shuffle(share, seed + 1 + at.rank, at.step // steps)
    start = at.step % steps * batch
    return mine[order[start : start + batch]]


def _steps(rows: int, needed: int, at: BatchOf) -> int:
    if not 0 <= at.rank < at.size or at.step < 0:
        raise WorkloadError(f"there is no step {at.step} for rank {at.rank} of {at.size}")
    if rows < needed:
        raise WorkloadError(f"a step needs {needed} rows and there are {rows}: lower batch_size or the number of ranks")
    return rows // needed


@lru_cache(maxsize=2)
def _by_group(groups: Tensor) -> Tensor:
    """The rows in the order of their groups: sorted once, and not for each batch. A tensor is known by its identity."""
    return groups.argsort(stable=True)


@lru_cache(maxsize=8)
def _shuffle(rows: int, seed: int, epoch: int) -> Tensor:
    """The shuffle of an epoch, which all ranks and steps of it read."""
    # Without the factor, seed 0 in epoch 1 would be seed 1 in epoch 0.
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + epoch) % 2**63)
    return torch.randperm(rows, generator=generator)
