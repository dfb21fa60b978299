"""Rows are dealt out without overlap, and the same way everywhere."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.bench.workloads import WorkloadError
from gossamer.bench.workloads.shards import BatchOf, grouped, iid


@given(rows=st.integers(1, 200), batch=st.integers(1, 5), size=st.integers(1, 6), seed=st.integers(0, 99))
def test_iid_sees_no_row_twice_in_an_epoch(rows: int, batch: int, size: int, seed: int) -> None:
    if rows < batch * size:
        with pytest.raises(WorkloadError, match="lower batch_size"):
            iid(rows, batch, BatchOf(0, 0, size), seed)
        return
    steps = rows // (batch * size)
    seen = [i for s in range(steps) for r in range(size) for i in iid(rows, batch, BatchOf(s, r, size), seed).tolist()]
    assert len(seen) == len(set(seen)) == steps * size * batch
    assert all(0 <= i < rows for i in seen)


def test_the_next_epoch_has_another_order() -> None:
    first, second = (iid(64, 16, BatchOf(step, 0, 1), seed=0) for step in (0, 4))
    assert not torch.equal(first, second)
    assert not torch.equal(second, iid(64, 16, BatchOf(0, 0, 1), seed=1))


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=120),
    batch=st.integers(1, 4),
    size=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_groups_are_cut_not_mixed(labels: list[int], batch: int, size: int, seed: int) -> None:
    groups = torch.tensor(labels)
    share = len(labels) // size
    if share < batch:
        with pytest.raises(WorkloadError, match="lower batch_size"):
            grouped(groups, batch, BatchOf(0, 0, size), seed)
        return
    shards = []
    for rank in range(size):
        steps = range(share // batch)
        shards.append([i for s in steps for i in grouped(groups, batch, BatchOf(s, rank, size), seed).tolist()])
        assert len(shards[-1]) == len(set(shards[-1]))
    everything = [i for shard in shards for i in shard]
    assert len(everything) == len(set(everything))
    for shard, later in pairwise(shards):  # sorted: what a rank knows ends where the next one's begins
        assert max(labels[i] for i in shard) <= min(labels[i] for i in later)


def test_each_epoch_goes_through_the_same_shard() -> None:
    groups = torch.arange(40) % 4
    epochs = [
        {i for s in range(5) for i in grouped(groups, 2, BatchOf(s + 5 * epoch, 1, 4), seed=0).tolist()}
        for epoch in range(3)
    ]
    assert epochs[0] == epochs[1] == epochs[2] == set(range(1, 40, 4))


@pytest.mark.parametrize("at", [BatchOf(0, 2, 2), BatchOf(-1, 0, 1), BatchOf(0, -1, 1)])
def test_there_is_no_such_place(at: BatchOf) -> None:
    with pytest.raises(WorkloadError, match="there is no step"):
        iid(8, 1, at, seed=0)
