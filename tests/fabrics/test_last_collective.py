"""A program that failed in a collective ends as it would have, with the answer of a rank that had it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, Compute, Program, all_gather, all_reduce, read_all_gather
from gossamer.fabrics.torch.last_collective import LastCollective, level


def task_of(program: Program[Any]) -> Any:
    return SimpleNamespace(program=program, error=RuntimeError("lost"), result=None, order=None)


def summed(mine: Tensor) -> Program[Tensor]:
    total = yield from all_reduce(mine)
    return (yield Compute(lambda: total / 2, "mean"))


def gathered(mine: Tensor) -> Program[Tensor]:
    return torch.stack((yield from all_gather(mine.view(torch.uint8)))).view(torch.float32).sum(0)


def read(mine: Tensor) -> Program[Tensor]:
    total = torch.zeros_like(mine)

    def add(rank: int, wire: Tensor) -> None:
        total.add_(wire.view(torch.float32))

    yield from read_all_gather(mine.view(torch.uint8), add)
    return total


def answered(last: LastCollective, verb: Any, both: tuple[Tensor, Tensor], reads: int = 2) -> Any:
    match verb:
        case AllReduce():
            return both[0] + both[1]
        case AllGather(_, None):
            return [each.view(torch.uint8) for each in both]
        case _:
            heard = last.heard(verb.read)
            for rank in range(reads):
                heard(rank, both[rank].view(torch.uint8))
            return []


@pytest.mark.parametrize("make", [summed, gathered, read])
def test_a_broken_program_ends_with_the_answer_of_another_rank(make: Callable[[Tensor], Program[Tensor]]) -> None:
    both = torch.tensor([1.0, 2.0, 3.5]), torch.tensor([0.25, -4.0, 1e-9])
    ahead, behind = LastCollective(3), LastCollective(3)
    there = make(both[0].clone())
    asked = next(there)
    answer = answered(ahead, asked, both)
    ahead.came(asked, answer)
    ended = task_of(there)
    ahead.broke(ended, asked, True, answer)
    ahead.drive_on(answer)
    here = make(both[1].clone())
    broken = task_of(here)
    verb = next(here)
    if make is read:
        answered(behind, verb, both, reads=1)  # it failed between two wires
    behind.broke(broken, verb, False, None)
    assert not behind.is_resolved
    assert behind.awaits(2) == ahead.length
    behind.take(ahead.give())
    assert behind.is_resolved
    assert torch.equal(broken.result, ended.result)


def test_a_program_that_asks_for_more_stays_broken() -> None:
    def twice(x: Tensor) -> Program[Tensor]:
        return (yield from all_reduce((yield from all_reduce(x))))

    program, last = twice(torch.ones(2)), LastCollective(1)
    task = task_of(program)
    last.broke(task, next(program), False, None)
    last.take(torch.tensor([5.0, 6.0]).view(torch.uint8))
    assert not last.is_resolved


def test_what_some_ranks_asked_among_themselves_is_neither_counted_nor_given_nor_driven_on() -> None:
    """In a node ranks may be more than one such request apart; a program of theirs that fails in one stays failed."""
    last = LastCollective(2)
    program = all_reduce(torch.ones(2), among=(0, 1))
    task = task_of(program)
    verb = next(program)
    for arrived in (False, True):
        last.broke(task, verb, arrived, torch.ones(2))
        assert last.broke_among_some
        assert last.awaits(4) == 0
    leveling = level(last, 4, 0, torch.device("cpu"))
    next(leveling)
    assert not last.is_resolved
    assert task.error is not None
