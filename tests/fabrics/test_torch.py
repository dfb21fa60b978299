"""Each verb on real processes, and in the ledger."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.core import verbs
from gossamer.core.errors import WireError
from gossamer.core.verbs import Join, OptimizerStep, Program, Start
from gossamer.fabrics.ledger import Ledger
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang

Everywhere = Callable[..., list[Any]]


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
    for handle in sent:
        fabric.join(handle)
    total = float(fabric.run(verbs.all_reduce(torch.ones(1))))
    arrived = [fabric.run(verbs.receive(source, 200_000)) for _ in range(3)]
    fabric.close()
    assert total == size
    return [int(a.sum()) for a in arrived]


def test_letters_may_be_read_in_a_later_program(everywhere: Everywhere) -> None:
    answers = everywhere(letters_ahead)
    assert answers == [[0, 200_000, 400_000]] * len(answers)


def totals(rank: int, size: int) -> tuple[dict[str, tuple[int, int]], int, int, list[tuple[int, str]]]:
    def program(rank: int, size: int) -> Program[None]:
        for step in (1, 2):
            handle = yield Start(work(rank, size), f"bucket {step}", step)
            yield Join(handle)

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
        yield OptimizerStep()

    for drive in (fabric.run, lambda p: fabric.join(fabric.start(p))):
        with pytest.raises(RuntimeError, match="OptimizerStep"):
            drive(program())
    fabric.close()


def test_the_random_state_of_the_process_is_left_alone() -> None:
    before = torch.get_rng_state()
    driven(lambda rank, size: verbs.all_reduce(torch.ones(3)))
    assert torch.equal(before, torch.get_rng_state())
