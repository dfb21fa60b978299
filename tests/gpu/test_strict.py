"""The strict process group itself: each of NCCL's rules, broken once, is seen."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.nursery import Nursery, RankError

pytestmark = pytest.mark.gang

LONG, SHORT = 30.0, 0.5  # seconds of the watchdog, where nothing hangs and where something does


def group_of(name: str, rank: int, size: int, eager: bool, patience: float) -> Any:
    from tests.gpu.nccl import StrictGroup

    store = dist.distributed_c10d._get_default_store()
    return StrictGroup(store, name, rank, size, torch.device("cuda", rank), eager, patience)


def with_group(rank: int, size: int, eager: bool, patience: float, act: Callable[[Any, int, int], Any]) -> Any:
    torch.cuda.set_device(rank)
    group = group_of("g", rank, size, eager, LONG)
    dist.barrier()
    group.patience = patience
    return act(group, rank, size)


def mine(rank: int, length: int = 4) -> torch.Tensor:
    return torch.full((length,), rank + 1, dtype=torch.uint8, device="cuda")


def gathers_and_adds(group: Any, rank: int, size: int) -> list[Any]:
    x = mine(rank)
    out = torch.empty(4 * size, dtype=torch.uint8, device="cuda")
    group._allgather_base(out, x).wait()
    group.allreduce([x]).wait()
    return [out.tolist(), x.tolist()]


def passes_on_in_groups(group: Any, rank: int, size: int) -> list[int]:
    """A ring, twice."""
    x = mine(rank)
    for _ in range(2):
        room = torch.empty_like(x)
        group._start_coalescing()
        group.send([x], (rank + 1) % size, 0)
        group.recv([room], (rank - 1) % size, 0)
        group._end_coalescing().wait()
        x = room
    return x.tolist()


def passes_on_by_alltoall(group: Any, rank: int, size: int) -> list[int]:
    there, back = [0] * size, [0] * size
    there[(rank + 1) % size] = back[(rank - 1) % size] = 4
    room = torch.empty(4, dtype=torch.uint8, device="cuda")
    group.alltoall_base(room, mine(rank), back, there).wait()
    return room.tolist()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_the_numbers_are_right(nursery: Nursery, size: int, eager: bool) -> None:
    total, everyone = size * (size + 1) // 2, [v for r in range(size) for v in [r + 1] * 4]
    assert nursery.run(size, with_group, eager, LONG, gathers_and_adds) == [[everyone, [total] * 4]] * size
    assert nursery.run(size, with_group, eager, LONG, passes_on_in_groups) == [
        [(r - 2) % size + 1] * 4 for r in range(size)
    ]
    assert nursery.run(size, with_group, eager, LONG, passes_on_by_alltoall) == [
        [(r - 1) % size + 1] * 4 for r in range(size)
    ]


def sends_first(group: Any, rank: int, size: int) -> None:
    group.send([mine(rank)], (rank + 1) % size, 0)
    group.recv([mine(rank)], (rank - 1) % size, 0).wait()


def disagrees(group: Any, rank: int, size: int) -> None:
    group.allreduce([mine(rank, 4 + rank)]).wait()


def stays_away(group: Any, rank: int, size: int) -> None:
    if rank:
        group.allreduce([mine(rank)]).wait()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("size", "act", "words"),
    [
        (2, sends_first, "has not ended in time"),
        (3, sends_first, "has not ended in time"),
        (2, disagrees, "differs between ranks"),
        (2, stays_away, "has not ended in time"),
    ],
)
def test_what_hangs_ends_the_process(
    nursery: Nursery, size: int, eager: bool, act: Callable[[Any, int, int], Any], words: str
) -> None:
    with pytest.raises(RankError, match=words):
        nursery.run(size, with_group, eager, SHORT, act)


def gives_a_cpu_tensor(group: Any, rank: int, size: int) -> None:
    group.allreduce([torch.ones(4)])


def gives_a_strided_tensor(group: Any, rank: int, size: int) -> None:
    group.allreduce([mine(rank, 8)[::2]])


def gives_another_devices_tensor(group: Any, rank: int, size: int) -> None:
    group.allreduce([torch.ones(4, device="cuda:5")])


def reduces_booleans(group: Any, rank: int, size: int) -> None:
    group.allreduce([mine(rank).bool()])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (gives_a_cpu_tensor, "No backend type associated with device type cpu"),
        (gives_a_strided_tensor, "Tensors must be contiguous"),
        (gives_another_devices_tensor, "a tensor of cuda:5"),
        (reduces_booleans, "not supported for NCCL"),
    ],
)
def test_what_it_does_not_take_is_refused(nursery: Nursery, act: Callable[[Any, int, int], Any], words: str) -> None:
    with pytest.raises(RankError, match=words):
        nursery.run(2, with_group, True, LONG, act)


def reads_without_waiting(group: Any, rank: int, size: int) -> list[str]:
    from tests.gpu.diary import diary

    x = mine(rank, 100)
    work = group.allreduce([x])
    x.sum()
    work.wait()
    return [*diary.races]


def test_who_reads_before_it_has_waited_races(nursery: Nursery) -> None:
    for races in nursery.run(2, with_group, True, LONG, reads_without_waiting):
        assert len(races) == 1
        assert "NCCL's g/all writes at allreduce" in races[0]


def two_at_once(rank: int, size: int, waits: bool) -> list[str]:
    from tests.gpu import nccl, orders

    torch.cuda.set_device(rank)
    a, b = (group_of(name, rank, size, True, LONG) for name in "ab")
    for group in (a, b) if rank or waits else (b, a):
        work = group.allreduce([mine(rank)])
        if waits:
            work.wait()
    torch.cuda.synchronize()
    logs: list[Any] = [None] * size
    dist.all_gather_object(logs, nccl.launched)
    return orders.inverted(logs)


def test_two_communicators_in_flight_in_two_orders_are_told(nursery: Nursery) -> None:
    assert nursery.run(2, two_at_once, True) == [[], []]
    for found in nursery.run(2, two_at_once, False):
        assert len(found) == 1
        assert "rank 0 launches ('b/all', 1) before ('a/all', 1), rank 1 the other way round" in found[0]


def cpu_tensor_to_gloo(rank: int, size: int) -> None:
    group: Any = dist.ProcessGroupGloo(dist.PrefixStore("x", dist.distributed_c10d._get_default_store()), rank, size)
    group.send([mine(rank)], 1 - rank, 0)


def test_gloo_sends_no_cuda_tensors(nursery: Nursery) -> None:
    with pytest.raises(RankError, match="unsupported device type cuda"):
        nursery.run(2, cpu_tensor_to_gloo)


def ends_at_once(_: Connection) -> None: ...


def test_a_nursery_whose_process_is_gone_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Nursery()
    monkeypatch.setattr("tests.gpu.nursery._serve", ends_at_once)
    with pytest.raises((EOFError, OSError)):
        alone.run(1, with_group)
    assert alone._pipe is None
