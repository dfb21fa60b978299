"""Wires that are made and read while others travel: the same on the simulator and on real processes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.core.errors import GossamerError, WireError
from gossamer.core.verbs import Program, all_to_all, read_all_gather, read_all_to_all, receive, send
from gossamer.core.wire import LazyWire, receive_order, send_order
from gossamer.fabrics.sim import simulate
from gossamer.fabrics.torch.fabric import TorchFabric

Everywhere = Callable[..., list[Any]]


def length(source: int, to: int) -> int:
    return (3 * source + 5 * to) % 4


def wire(source: int, to: int) -> Tensor:
    return torch.full((length(source, to),), 16 * source + to, dtype=torch.uint8)


def told(rank: int, size: int) -> Program[list[Any]]:
    """What is made and read, in the order in which it is."""
    events = list[Any]()

    def make(to: int) -> Tensor:
        events.append(("make", to))
        return wire(rank, to)

    def read(source: int, came: Tensor) -> None:
        events.append(("read", source, came.tolist()))

    def promise(to: int) -> LazyWire:
        return LazyWire(lambda: make(to), length(rank, to))

    yield from read_all_to_all([promise(j) for j in range(size)], [length(j, rank) for j in range(size)], read)
    exchanged, events = events, []
    yield from read_all_gather(torch.full((5,), rank, dtype=torch.uint8), read)
    gathered, events = events, []
    yield from read_all_gather(torch.empty(0, dtype=torch.uint8), read)
    return [exchanged, gathered, events]


def expected(rank: int, size: int) -> list[Any]:
    made = [("make", j) for j in send_order(rank, size)]
    read = [("read", j, wire(j, rank).tolist()) for j in receive_order(rank, size)]
    return [
        made,
        read,
        [("read", j, [j] * 5) for j in receive_order(rank, size)],
        [("read", j, []) for j in receive_order(rank, size)],
    ]


def sorted_out(told: list[Any]) -> list[Any]:
    """Making and reading take turns as a fabric sees fit; each for itself has an order."""
    exchanged, gathered, empty = told
    return [[e for e in exchanged if e[0] == "make"], [e for e in exchanged if e[0] == "read"], gathered, empty]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_simulated_wires_are_made_and_read_in_the_stated_order(size: int) -> None:
    outcome = simulate([told(r, size) for r in range(size)])
    assert [sorted_out(t) for t in outcome.results] == [expected(r, size) for r in range(size)]


def on_processes(rank: int, size: int) -> list[Any]:
    fabric = TorchFabric(deadline=20)
    try:
        return fabric.run(told(rank, size))
    finally:
        fabric.close()


@pytest.mark.gang
def test_real_wires_are_made_and_read_in_the_stated_order(everywhere: Everywhere) -> None:
    answers = everywhere(on_processes)
    assert [sorted_out(t) for t in answers] == [expected(r, len(answers)) for r in range(len(answers))]


@pytest.mark.gang
def test_while_a_wire_travels_the_next_is_made_and_the_last_is_read(gang4: Any) -> None:
    exchanged = gang4.run(on_processes)[0][0]
    kinds = [e[0] for e in exchanged]
    assert kinds == ["make", "make", "read", "make", "read", "make", "read", "read"]


def test_a_promise_that_is_not_kept_is_refused() -> None:
    short = LazyWire(lambda: torch.zeros(3, dtype=torch.uint8), 4)
    with pytest.raises(WireError, match="declared 4 bytes, and its function made 3"):
        simulate([all_to_all([short], [4])])


def fails(rank: int, size: int, when: str) -> str:
    """One rank cannot make, or cannot read: it hears its own error, the others that it is gone."""

    def make() -> Tensor:
        if rank == 1 and when == "make":
            raise RuntimeError("no wire today")
        return torch.zeros(4, dtype=torch.uint8)

    def read(source: int, came: Tensor) -> None:
        if rank == 1 and when == "read":
            raise RuntimeError("cannot read this")

    fabric = TorchFabric(deadline=5)
    try:
        ticket = fabric.start(read_all_to_all([LazyWire(make, 4)] * size, [4] * size, read), "block", 3)
        fabric.join(ticket)
    except GossamerError as error:
        return f"peer: {error}"
    except RuntimeError as error:
        return f"own: {error}"
    finally:
        fabric.close()
    return "nothing"


@pytest.mark.gang
@pytest.mark.parametrize(("when", "what"), [("make", "no wire today"), ("read", "cannot read this")])
def test_an_error_in_making_or_reading_is_the_programs_own(gang2: Any, when: str, what: str) -> None:
    other, own = gang2.run(fails, when)
    assert own == f"own: {what}"
    assert other.startswith("peer: rank 0 of 2: step 3, 'block', AllToAll") or other == "nothing"


def test_a_simulated_error_in_reading_is_raised() -> None:
    def read(source: int, came: Tensor) -> None:
        raise ValueError("cannot read this")

    with pytest.raises(ValueError, match="cannot read this"):
        simulate([read_all_gather(torch.zeros(1, dtype=torch.uint8), read) for _ in range(3)])


def letters(rank: int, size: int) -> list[Any]:
    """Everybody sends to the next rank and says first what it awaits; then one asks for something else."""
    ahead, behind = (rank + 1) % size, (rank - 1) % size

    def program(asked: int) -> Program[Tensor]:
        yield from send(ahead, torch.full((5,), rank, dtype=torch.uint8), [(behind, 5)])
        return (yield from receive(behind, asked))

    fabric = TorchFabric(deadline=5)
    try:
        return [fabric.run(program(5)).tolist(), fabric.run(program(5)).tolist(), fabric.run(program(4)).tolist()]
    except ValueError as error:
        return [str(error)]
    finally:
        fabric.close()


@pytest.mark.gang
def test_a_letter_that_was_awaited_is_the_one_received(gang2: Any) -> None:
    assert gang2.run(letters) == [
        [f"Receive of 4 bytes from rank {1 - r}, but the last Send awaits 5 bytes of it"] for r in range(2)
    ]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_awaiting_changes_nothing_in_simulation(size: int) -> None:
    def program(rank: int) -> Program[Tensor]:
        yield from send((rank + 1) % size, torch.full((5,), rank, dtype=torch.uint8), [((rank - 1) % size, 5)])
        return (yield from receive((rank - 1) % size, 5))

    outcome = simulate([program(r) for r in range(size)])
    assert [t.tolist() for t in outcome.results] == [[(r - 1) % size] * 5 for r in range(size)]
