"""Lanes, quorums, and several fabrics at once."""

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang

from gossamer.core import verbs
from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.torch.endpoint import Endpoint
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

Everywhere = Callable[..., list[Any]]


def uneven_starts(rank: int, size: int) -> list[float]:
    """Bucket after bucket, each rank at its own pace, in the lane and out of it."""
    fabric = TorchFabric(deadline=20)
    order = list[int]()

    def bucket(i: int) -> Program[float]:
        yield Compute(lambda: time.sleep(0.01 * ((i * (rank + 1)) % 3)), "work")
        order.append(i)
        return float((yield from verbs.all_reduce(torch.tensor([float(i * (rank + 1))]))))

    tickets = list[verbs.Handle[float]]()
    for i in range(8):
        time.sleep(0.01 * ((i + rank) % 2))
        tickets.append(fabric.start(bucket(i), f"bucket {i}", step=1))
    answers = [fabric.join(t) for t in tickets]
    assert all(t.done() for t in tickets)
    assert order == list(range(8))
    fabric.close()
    return answers


def test_programs_keep_their_order_whatever_the_pace(everywhere: Everywhere) -> None:
    answers = everywhere(uneven_starts)
    size = len(answers)
    assert answers == [[i * size * (size + 1) / 2 for i in range(8)]] * size


def slow_to_connect(rank: int, size: int) -> tuple[float, float]:
    """When this rank was connected, and when its fabric was there; the last rank connects more slowly."""
    connect, ends = Endpoint.connect, list[float]()

    def slowly(*arguments: Any) -> Any:
        connection = connect(*arguments)
        time.sleep(0.5 if rank == size - 1 else 0)
        ends.append(time.monotonic())
        return connection

    with mock.patch.object(Endpoint, "connect", slowly):
        fabric = TorchFabric(deadline=20)
    ready = time.monotonic()
    fabric.close()
    return ends[0], ready


def test_no_rank_may_leave_while_another_still_connects(gang2: Gang) -> None:
    """The other's connection would end while it is made, and this rank would look lost."""
    connected, ready = zip(*gang2.run(slow_to_connect), strict=True)
    assert min(ready) >= max(connected)


def two_lanes(rank: int, size: int) -> float:
    """A program on one lane starts and joins others; lanes do not wait for each other."""
    fabric = TorchFabric(deadline=20)
    fabric.open_lane("slow")
    gate = threading.Event()

    def slow() -> Program[float]:
        yield Compute(gate.wait, "wait")
        return float((yield from verbs.all_reduce(torch.ones(1))))

    def fast() -> Program[float]:
        early = yield from verbs.start(slow(), "slow", lane="slow")
        later = yield from verbs.start(verbs.all_reduce(torch.ones(1)), "later")
        own = float((yield from verbs.all_reduce(torch.ones(1))))
        assert not early.done()
        assert not later.done()
        gate.set()
        return own + (yield from verbs.join(early))

    answer = fabric.join(fabric.start(fast(), "fast"))
    fabric.close()
    return answer


def test_lanes_go_on_without_each_other(everywhere: Everywhere) -> None:
    answers = everywhere(two_lanes)
    assert answers == [2.0 * len(answers)] * len(answers)


def quorum(rank: int, size: int) -> tuple[float, tuple[int, ...], int]:
    """All ranks but the last close the round; the last comes late."""
    fabric = TorchFabric(deadline=20)
    fabric.open_lane("claims")
    count = max(1, size - 1)
    waiting = fabric.start(verbs.wait_quorum("round", count), "round")
    late = size > 1 and rank == size - 1
    if late:
        holders = fabric.join(waiting)
    ticket = fabric.join(fabric.start(verbs.take_ticket("round"), lane="claims"))
    if not late:
        holders = fabric.join(waiting)
    agreed = fabric.run(verbs.all_reduce(torch.tensor([float(rank in holders)])))
    fabric.close()
    return float(agreed), holders, ticket


def test_a_quorum_closes_without_the_late_rank(everywhere: Everywhere) -> None:
    answers = everywhere(quorum)
    size = len(answers)
    holders = answers[0][1]
    assert sorted(holders) == list(range(max(1, size - 1)))
    for rank, (flags, seen, ticket) in enumerate(answers):
        assert (flags, seen) == (len(holders), holders)
        assert ticket == (holders.index(rank) + 1 if rank in holders else size)


def two_fabrics(rank: int, size: int) -> tuple[int, int, float]:
    one, other = TorchFabric(deadline=20), TorchFabric(deadline=20)
    first = one.start(verbs.all_reduce(torch.ones(1)))
    second = other.start(verbs.all_reduce(torch.full((1,), 10.0)))
    total = float(other.join(second)) + float(one.join(first))
    tickets = one.run(verbs.take_ticket("same name")), other.run(verbs.take_ticket("same name"))
    one.close()
    other.close()
    return (*tickets, total)


def test_two_fabrics_do_not_hear_each_other(everywhere: Everywhere) -> None:
    answers = everywhere(two_fabrics)
    size = len(answers)
    assert [a[2] for a in answers] == [11.0 * size] * size
    assert sorted(a[0] for a in answers) == sorted(a[1] for a in answers) == list(range(1, size + 1))


def some_ranks(rank: int, size: int) -> list[float]:
    """Fabrics of three of the four ranks, and of each half; made again, too."""
    answers = list[float]()
    three = dist.new_group([0, 1, 2])
    if rank < 3:
        fabric = TorchFabric(three, deadline=20)
        assert (fabric.rank, fabric.size) == (rank, 3)
        answers.append(float(fabric.run(verbs.all_reduce(torch.ones(1)))))
        fabric.close()
    halves = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    for _ in range(2):
        fabric = TorchFabric(halves[rank // 2], deadline=20)
        answers.append(float(fabric.run(verbs.all_reduce(torch.tensor([float(rank)])))))
        there = fabric.run(verbs.send(1 - fabric.rank, torch.tensor([rank], dtype=torch.uint8)))
        assert there is None
        assert fabric.run(verbs.receive(1 - fabric.rank, 1)).tolist() == [rank ^ 1]
        fabric.close()
    return answers


def test_a_fabric_may_span_some_ranks_only(gang4: Gang) -> None:
    assert gang4.run(some_ranks) == [[3, 1, 1], [3, 1, 1], [3, 5, 5], [5, 5]]
