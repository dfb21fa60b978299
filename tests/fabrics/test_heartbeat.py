"""Alive or dead: who works is waited for, who is silent, has left or stands still with all others is not."""

import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fabrics.test_torch_failures import failure
from tests.gang import Gang
from tests.marked import SLACK
from torch.distributed import HashStore

from gossamer.core import verbs
from gossamer.core.errors import PeerError
from gossamer.fabrics.liveness.heartbeat import RankStatus, rank_statuses
from gossamer.fabrics.liveness.store import LONGEST, SharedStore
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.fabrics.torch.fingerprints import CollectiveFingerprint, read_all
from gossamer.fabrics.torch.tickets import Tickets

DEADLINE = 1.5


def evaluates(rank: int, size: int, check: int, how: str) -> tuple[float, list[str]]:
    """Rank 0 is busy elsewhere for three deadlines: it sleeps, or it computes in Python without end."""
    fabric = TorchFabric(deadline=DEADLINE, check=check)
    fabric.run(verbs.all_reduce(torch.ones(1)))
    until = time.monotonic() + 3 * DEADLINE
    while rank == 0 and time.monotonic() < until:
        if how == "sleeps":
            time.sleep(3 * DEADLINE)
        else:
            sum(range(10_000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = float(fabric.join(fabric.start(verbs.all_reduce(torch.ones(1)), "head", step=7)))
    fabric.close()
    return total, [str(w.message) for w in caught if w.category is RuntimeWarning]


@pytest.mark.gang
@pytest.mark.parametrize(("check", "how"), [(0, "sleeps"), (8, "computes")])
def test_a_rank_that_works_is_waited_for_and_named_once(gang4: Gang, check: int, how: str) -> None:
    outcomes = gang4.run(evaluates, check, how)
    assert outcomes[0] == (4.0, [])
    for rank in (1, 2, 3):
        total, said = outcomes[rank]
        assert total == 4.0
        assert said == [
            f"rank {rank} has waited 1.5 seconds at step 7, 'head': rank 0 is alive and busy elsewhere, "
            "so it continues to wait"
        ]


def params(rank: int, size: int) -> tuple[str, str, float]:
    """A rank is through before the others, within the first collectives, which are compared."""
    fabric = TorchFabric(deadline=30.0)
    fabric.run(verbs.all_reduce(torch.ones(1)))
    if rank == 1:
        fabric.close()
        return "", "", 0.0
    return failure(fabric, lambda: fabric.join(fabric.start(verbs.all_reduce(torch.ones(1)), "head", step=2)))


@pytest.mark.gang
def test_a_rank_that_has_left_is_noticed_at_once(gang4: Gang) -> None:
    for rank, (name, text, seconds) in enumerate(gang4.run(params)):
        if rank != 1:
            assert name == "PeerError"
            assert "Rank 1 has detached or ended" in text
            assert seconds < 2.0 + SLACK


def silent(rank: int, size: int) -> tuple[str, str, float]:
    """A rank stands still while the others open another lane: so do those that are started inside `attach`."""
    fabric = TorchFabric(deadline=2 * DEADLINE)  # of two that wait, one must not think the other silent, who is slow
    pids = fabric.run(verbs.all_reduce(torch.tensor([os.getpid() * (rank == 1)])))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        return failure(fabric, lambda: fabric.open_lane("second"))
    finally:
        if rank == 0:
            os.kill(int(pids), signal.SIGKILL)


@pytest.mark.gang
def test_a_rank_that_freezes_while_a_lane_is_opened_is_named_in_time() -> None:
    gang = Gang(3)
    try:
        outcomes = gang.run(silent, lost=[1])
    finally:
        gang.close()
    for rank in (0, 2):
        name, text, seconds = outcomes[rank]
        assert name == "PeerError"
        assert "No answer from rank 1: dead, frozen, cut off, or not started yet." in text
        assert seconds < 2 * DEADLINE + 2.0 + SLACK


def unequal(rank: int, size: int, kind: str) -> tuple[str, str, float]:
    """Long after the first collectives, one rank sends more than another one expects, who waits for the deadline."""
    fabric = TorchFabric(deadline=3 * DEADLINE, check=1)  # with slack: a rank may be late

    def wire(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.uint8)

    def program(n: int) -> verbs.Program[Any]:
        if kind == "all to all":
            yield from verbs.all_to_all([wire(n)] * size, [n if j == rank else 10 for j in range(size)])
        elif kind == "letter":
            yield from verbs.send(1 - rank, wire(n))
            yield from verbs.receive(1 - rank, 10)
        else:
            yield from verbs.all_reduce(torch.ones(n))

    for n in (10, 20) * 3 if kind == "usual sizes" else (10,) * 6:
        fabric.join(fabric.start(program(n), "head", step=1))
    n = 20 if rank == 1 else 10
    return failure(fabric, lambda: fabric.join(fabric.start(program(n), "head", step=2)))


@pytest.mark.gang
@pytest.mark.parametrize("kind", ["all to all", "letter", "usual sizes"])
def test_sizes_that_differ_are_an_error_and_do_not_end_the_process(gang2: Gang, kind: str) -> None:
    outcomes = gang2.run(unequal, kind)
    assert any(name == "PeerError" for name, _, _ in outcomes)
    for name, text, _ in outcomes:
        assert name in ("PeerError", "")  # who got its own letter in time is fine
        if kind == "all to all":
            assert "Rank 1 sends 20 bytes to rank 0, which expects 10." in text


def keys(rank: int, size: int) -> tuple[int, int]:
    """How many keys fabrics leave behind when they are closed by all."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    counts = list[int]()
    for _ in range(3):
        fabric = TorchFabric(deadline=20.0)
        for step in range(12):
            fabric.join(fabric.start(verbs.all_reduce(torch.ones(1)), "head", step))
        fabric.close()
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts[-1], counts[0]


@pytest.mark.gang
def test_fabrics_leave_no_keys_behind(gang2: Gang) -> None:
    for last, first in gang2.run(keys):
        assert last <= first


BAD = ("", "{", "[1]", "null", '[1, "sleeps", {}, 0]', '[1, "left", {"comm": "x"}, 0]', "[" * 100_000, "\u00b5" * 10)


@pytest.mark.parametrize("text", BAD)
@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("fabric/pulse/1", rank_statuses),
        ("fabric/check/3/1", lambda store: read_all(store, "check/3", {1: store.read(["check/3/1"])[0]})),
        ("fabric/round/1", lambda store: Tickets(store).holders("round", 1)),
        ("fabric/notice/1", lambda store: store.numbers(["notice/1"])),
    ],
)
def test_what_no_rank_writes_is_an_error_that_names_the_key(
    key: str, read: Callable[[SharedStore], Any], text: str
) -> None:
    store = HashStore()
    store.set(key, text)
    with pytest.raises(PeerError, match=key):
        read(SharedStore(store, 0, 2).under("fabric"))


@pytest.mark.parametrize("value", [b"\xff\xfe", b"x" * (LONGEST + 1)])
def test_what_is_no_text_or_too_long_is_an_error_that_names_the_key(value: bytes) -> None:
    store = HashStore()
    store.set("fabric/word", value)
    with pytest.raises(PeerError, match="fabric/word") as caught:
        SharedStore(store, 0, 2).under("fabric").read(["word"])
    assert len(str(caught.value)) < 500


def test_what_ranks_do_write_is_read() -> None:
    store = SharedStore(HashStore(), 0, 3).under("fabric")
    said = RankStatus(3, "left", {"comm": 12})
    store.raise_flag("pulse/2", said.write())
    assert rank_statuses(store) == {2: said}
    place = CollectiveFingerprint(1, "head", 2, "AllToAll", [1, 2, 3], [4, 5, 6], "late")
    assert read_all(store, "check/1", {1: place.write()}) == {1: place}
