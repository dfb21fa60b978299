"""Each verb on real processes, in order, on time, and in the ledger."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang, free_port
from torch import Tensor

from gossamer.core import verbs
from gossamer.core.errors import WireError
from gossamer.core.verbs import Compute, Descend, Join, Program, Start
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.torch import TorchFabric

pytestmark = pytest.mark.gang

Everywhere = Callable[..., list[Any]]


@pytest.fixture(params=[1, 2, 4])
def everywhere(request: pytest.FixtureRequest) -> Iterator[Everywhere]:
    """Calls a function on all ranks of a world of this size; a world of one needs no process group."""
    if request.param == 1:
        yield lambda fn, *args: [fn(0, 1, *args)]
    else:
        yield request.getfixturevalue(f"gang{request.param}").run


def wire(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def driven(make: Callable[[int, int], Program[Any]], **options: Any) -> tuple[Any, Ledger]:
    """Run one program per rank on a new fabric."""
    fabric = TorchFabric(deadline=20, **options)
    try:
        return fabric.run(make(fabric.rank, fabric.size)), fabric.ledger
    finally:
        fabric.close()


def reductions(rank: int, size: int) -> None:
    fabric = TorchFabric(deadline=20)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        for op, expected in (("sum", size * (size + 1) // 2), ("max", size), ("min", 1)):
            given = torch.full((7,), rank + 1, dtype=dtype)
            answer = fabric.run(verbs.all_reduce(given, op))  # type: ignore[arg-type]
            assert answer is given
            assert answer.tolist() == [expected] * 7
    strided = torch.ones(4, 4)[:, 1]
    assert fabric.run(verbs.all_reduce(strided)).tolist() == [size] * 4
    assert fabric.run(verbs.all_reduce(torch.empty(0))).numel() == 0
    fabric.close()


def test_all_reduce_adds_and_compares_in_place_in_every_dtype(everywhere: Everywhere) -> None:
    everywhere(reductions)


def gathers(rank: int, size: int) -> list[Any]:
    def program(rank: int, size: int) -> Program[list[Any]]:
        full = yield from verbs.all_gather(wire(rank, rank + 10))
        empty = yield from verbs.all_gather(wire())
        ragged = yield from verbs.all_gather_ragged(wire(*range(rank)), limit=size)
        return [[w.tolist() for w in wires] for wires in (full, empty, ragged)]

    return driven(program)[0]


def test_all_gather_keeps_rank_order_and_takes_empty_and_ragged_wires(everywhere: Everywhere) -> None:
    answers = everywhere(gathers)
    size = len(answers)
    full, empty, ragged = [[r, r + 10] for r in range(size)], [[]] * size, [list(range(r)) for r in range(size)]
    assert answers == [[full, empty, ragged]] * size


def exchanges(rank: int, size: int) -> list[Any]:
    def program(rank: int, size: int) -> Program[list[Any]]:
        to = [torch.full(((rank + 2 * j) % 3,), 16 * rank + j, dtype=torch.uint8) for j in range(size)]
        uneven = yield from verbs.all_to_all(to, [(j + 2 * rank) % 3 for j in range(size)])
        nothing = yield from verbs.all_to_all([wire()] * size, [0] * size)
        ragged = yield from verbs.all_to_all_ragged(to, limit=2)
        return [[w.tolist() for w in wires] for wires in (uneven, nothing, ragged)]

    return driven(program)[0]


def test_all_to_all_takes_uneven_and_empty_wires(everywhere: Everywhere) -> None:
    answers = everywhere(exchanges)
    size = len(answers)
    for rank, answer in enumerate(answers):
        uneven = [[16 * j + rank] * ((j + 2 * rank) % 3) for j in range(size)]
        assert answer == [uneven, [[]] * size, uneven]


def too_long(rank: int, size: int) -> str:
    fabric = TorchFabric(deadline=20)
    with pytest.raises(WireError) as caught:
        fabric.run(verbs.all_gather_ragged(wire(*range(10 * (rank + 1))), limit=10 * size - 1))
    fabric.close()
    return str(caught.value)


def test_ragged_wire_beyond_its_limit_is_refused(everywhere: Everywhere) -> None:
    answers = everywhere(too_long)
    size = len(answers)
    assert set(answers) == {
        f"rank {size - 1} announces a wire of {10 * size} bytes; at most {10 * size - 1} are possible here"
    }


def letters(rank: int, size: int) -> list[int]:
    def program(rank: int, size: int) -> Program[list[int]]:
        for i in range(5):
            yield from verbs.send((rank + 1) % size, torch.full((1000 * i,), i + 10 * rank, dtype=torch.uint8))
        seen = list[int]()
        for i in range(5):
            arrived = yield from verbs.receive((rank - 1) % size, 1000 * i)
            assert arrived.numel() == 1000 * i
            seen += arrived.unique().tolist()
        return seen

    return driven(program)[0]


def test_letters_arrive_in_the_order_of_sending(everywhere: Everywhere) -> None:
    answers = everywhere(letters)
    size = len(answers)
    assert answers == [[i + 10 * ((rank - 1) % size) for i in range(1, 5)] for rank in range(size)]


def letters_ahead(rank: int, size: int) -> list[int]:
    """All send in one program and read in a later one: nobody waits in between."""
    fabric = TorchFabric(deadline=20)
    to, source = (rank + 1) % size, (rank - 1) % size
    sent = [fabric.start(verbs.send(to, torch.full((200_000,), i, dtype=torch.uint8))) for i in range(3)]
    for ticket in sent:
        fabric.join(ticket)
    total = float(fabric.run(verbs.all_reduce(torch.ones(1))))
    arrived = [fabric.run(verbs.receive(source, 200_000)) for _ in range(3)]
    fabric.close()
    assert total == size
    return [int(a.sum()) for a in arrived]


def test_letters_may_be_read_in_a_later_program(everywhere: Everywhere) -> None:
    answers = everywhere(letters_ahead)
    assert answers == [[0, 200_000, 400_000]] * len(answers)


def uneven_starts(rank: int, size: int) -> list[float]:
    """Bucket after bucket, each rank at its own pace, in the lane and out of it."""
    fabric = TorchFabric(deadline=20)
    order = list[int]()

    def bucket(i: int) -> Program[float]:
        yield Compute(lambda: time.sleep(0.01 * ((i * (rank + 1)) % 3)), "work")
        order.append(i)
        return float((yield from verbs.all_reduce(torch.tensor([float(i * (rank + 1))]))))

    tickets = list[verbs.Ticket[float]]()
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
    waiting = fabric.start(verbs.closed("round", count), "round")
    late = size > 1 and rank == size - 1
    if late:
        holders = fabric.join(waiting)
    ticket = fabric.join(fabric.start(verbs.claim("round"), lane="claims"))
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
    tickets = one.run(verbs.claim("same name")), other.run(verbs.claim("same name"))
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
        there = fabric.run(verbs.send(1 - fabric.rank, wire(rank)))
        assert there is None
        assert fabric.run(verbs.receive(1 - fabric.rank, 1)).tolist() == [rank ^ 1]
        fabric.close()
    return answers


def test_a_fabric_may_span_some_ranks_only(gang4: Gang) -> None:
    assert gang4.run(some_ranks) == [[3, 1, 1], [3, 1, 1], [3, 5, 5], [5, 5]]


def totals(rank: int, size: int) -> tuple[dict[str, tuple[int, int]], int, int, list[tuple[int, str]]]:
    def program(rank: int, size: int) -> Program[None]:
        for step in (1, 2):
            ticket = yield Start(work(rank, size), f"bucket {step}", step)
            yield Join(ticket)

    def work(rank: int, size: int) -> Program[None]:
        yield from verbs.all_reduce(torch.ones(100))
        yield from verbs.all_gather(torch.zeros(10, dtype=torch.uint8))
        yield from verbs.all_to_all([torch.zeros(5, dtype=torch.uint8)] * size, [5] * size)

    _, ledger = driven(program, ledger=Ledger())
    assert ledger.seconds > 0
    return ledger.by_verb(), ledger.handed, ledger.received, [(e.step, e.label) for e in ledger]


def test_the_ledger_holds_every_byte(everywhere: Everywhere) -> None:
    answers = everywhere(totals)
    n = len(answers)
    reduced, gathered, exchanged = 2 * (n - 1) * 400 // n, 10 * (n - 1), 5 * (n - 1)
    for by_verb, handed, received, labels in answers:
        assert by_verb == {
            "AllReduce": (2, 2 * reduced),
            "AllGather": (2, 2 * gathered),
            "AllToAll": (2, 2 * exchanged),
        }
        assert handed == 2 * (400 + 10 + exchanged)
        assert received == 2 * (reduced + gathered + exchanged)
        assert labels == [(1, "bucket 1")] * 3 + [(2, "bucket 2")] * 3


def test_only_a_host_answers_descend() -> None:
    fabric = TorchFabric()

    def program() -> Program[None]:
        yield Descend()

    for drive in (fabric.run, lambda p: fabric.join(fabric.start(p))):
        with pytest.raises(RuntimeError, match="Descend"):
            drive(program())
    fabric.close()


def test_the_random_state_of_the_process_is_left_alone() -> None:
    before = torch.get_rng_state()
    driven(lambda rank, size: verbs.all_reduce(torch.ones(3)))
    assert torch.equal(before, torch.get_rng_state())


LEAVING = """
import os, sys, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
from gossamer.core.verbs import all_reduce, claim, closed
from gossamer.fabrics.torch import TorchFabric

rank, (port, *how) = int(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
fabric = TorchFabric(deadline=30, check=1)
assert fabric.run(all_reduce(torch.ones(1))).item() == 2
if "stuck" in how and rank == 0:
    fabric.start(all_reduce(torch.ones(1)))
if "polling" in how:
    fabric.start(closed("never", 3))
if "early" in how:
    fabric.close()
if "destroy" in how:
    dist.destroy_process_group()
if "late" in how:
    fabric.close()
"""


@pytest.mark.parametrize(
    "how", ["", "destroy", "early destroy", "destroy late", "polling", "polling destroy", "stuck", "stuck destroy"]
)
def test_the_interpreter_ends_cleanly(how: str) -> None:
    port = free_port()
    command = [sys.executable, "-c", LEAVING]
    both = [
        subprocess.Popen([*command, str(r), str(port), *how.split()], stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for process in both:
        _, errors = process.communicate(timeout=30)
        complaints = [line for line in errors.splitlines() if "hostname" not in line]
        assert (process.returncode, complaints) == (0, [])
