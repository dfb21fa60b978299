"""Ragged exchanges on the simulator: lengths first, and lies about them are refused on every rank."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from gossamer.core.errors import WireError
from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    AllToAll,
    Program,
    all_gather,
    all_gather_ragged,
    all_reduce,
    all_to_all_ragged,
)
from gossamer.fabrics.sim import simulate

SIZES = [1, 2, 3, 5]


def wire(rank: int, to: int, length: int) -> Tensor:
    return (torch.arange(length) * 7 + rank * 31 + to * 13).to(torch.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [lambda r: r * 5, lambda r: 9 - r, lambda r: 0, lambda r: 3 * (r == 1)])
def test_gathered_wires_of_any_lengths_arrive_whole_on_every_rank(size: int, length: Callable[[int], int]) -> None:
    mine = [wire(r, 0, length(r)) for r in range(size)]
    outcome = simulate([all_gather_ragged(w, 100) for w in mine])
    for got in outcome.results:
        assert all(torch.equal(a, b) for a, b in zip(got, mine, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_wires_of_any_lengths_reach_the_rank_they_are_for(size: int) -> None:
    wires = [[wire(r, j, (3 * r + 5 * j) % 7) for j in range(size)] for r in range(size)]
    outcome = simulate([all_to_all_ragged(w, 100) for w in wires])
    for j, got in enumerate(outcome.results):
        assert all(torch.equal(got[r], wires[r][j]) for r in range(size))


def test_a_ragged_gather_pays_eight_bytes_for_the_lengths_and_pads_to_the_longest() -> None:
    outcome = simulate([all_gather_ragged(wire(r, 0, 4 + r), 100) for r in range(3)])
    assert outcome.ledger.handed == 3 * 8 + 3 * 6


def ragged(announced: Sequence[int], answers: Callable[[], Program[list[Tensor]]]) -> list[Tensor]:
    """Run a ragged exchange against peers that announce these lengths."""
    program = answers()
    asked = next(program)
    lengths = [torch.tensor([n], dtype=torch.int64).view(torch.uint8) for n in announced]
    assert isinstance(asked, AllGather | AllToAll)
    second = program.send(lengths)
    assert isinstance(second, AllGather | AllToAll)
    try:
        program.send([torch.zeros(min(n, 64), dtype=torch.uint8) for n in announced])
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a third request")


EXCHANGES = {
    "gather": lambda: all_gather_ragged(torch.zeros(4, dtype=torch.uint8), 50),
    "all-to-all": lambda: all_to_all_ragged([torch.zeros(4, dtype=torch.uint8)] * 3, 50),
}


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES.keys())
@pytest.mark.parametrize("lie", [-1, 51, 2**62, -(2**63)])
def test_an_impossible_length_is_refused_before_anything_is_allocated(exchange, lie: int) -> None:
    with pytest.raises(WireError, match=rf"rank 1 announces a wire of {lie} bytes; at most 50"):
        ragged([4, lie, 4], exchange)


@pytest.mark.parametrize("exchange", EXCHANGES.values(), ids=EXCHANGES.keys())
def test_a_length_at_the_limit_is_possible(exchange) -> None:
    assert len(ragged([4, 50, 0], exchange)) == 3


def test_lies_are_refused_on_every_rank_alike() -> None:
    def honest(rank: int) -> Program[str]:
        try:
            yield from all_gather_ragged(wire(rank, 0, 3), 10)
        except WireError as error:
            return str(error)
        return "nothing was noticed"

    def liar() -> Program[str]:
        yield from all_gather(torch.tensor([10**9], dtype=torch.int64).view(torch.uint8))
        return "lied"

    outcome = simulate([honest(0), liar(), honest(2)])
    assert outcome.results[0] == outcome.results[2]
    assert "rank 1 announces" in outcome.results[0]


def test_a_program_runs_against_canned_answers() -> None:
    program = all_reduce(torch.ones(2), "max")
    asked = next(program)
    assert isinstance(asked, AllReduce)
    assert asked.op == "max"
    with pytest.raises(StopIteration) as stop:
        program.send(torch.full((2,), 5.0))
    assert stop.value.value.tolist() == [5.0, 5.0]
