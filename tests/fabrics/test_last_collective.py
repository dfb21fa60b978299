"""A program that failed in a collective ends as it would have, with the answer of a rank that had it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.core.verbs import (
    AllGather,
    AllReduce,
    Compute,
    Program,
    all_gather,
    all_reduce,
    all_to_all,
    read_all_gather,
)
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


def levelled(lasts: list[LastCollective | None]) -> list[bool | None]:
    """Run `level` on all ranks; each is told whether it stays behind."""
    programs = [level(last, 2, rank, torch.device("cpu")) for rank, last in enumerate(lasts)]
    verbs, ends = [next(program) for program in programs], list[bool | None]()
    while not ends:
        if isinstance(verbs[0], AllGather):
            answer: Any = [verb.wire for verb in verbs]  # type: ignore[union-attr]
        else:
            answer = torch.stack([verb.tensor for verb in verbs]).sum(0, dtype=torch.uint8)  # type: ignore[union-attr]
        for place, program in enumerate(programs):
            try:
                verbs[place] = program.send(answer)
            except StopIteration as end:
                ends.append(end.value)
    return ends


def swapped(mine: Tensor) -> Program[Tensor]:
    return (
        torch.stack((yield from all_to_all([mine.view(torch.uint8)] * 2, [mine.numel() * 4] * 2)))
        .view(torch.float32)
        .sum(0)
    )


@pytest.mark.parametrize(("make", "stays_behind"), [(summed, False), (gathered, False), (swapped, True)])
def test_who_cannot_be_given_a_whole_average_is_told_that_it_stays_behind(
    make: Callable[[Tensor], Program[Tensor]], stays_behind: bool
) -> None:
    """Rank 0 has ended its task; rank 1 has not got the answer, which after an all-to-all nobody can give it."""
    both = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    ahead, behind = LastCollective(3), LastCollective(3)
    there, here = (make(each.clone()) for each in both)
    asked, verb = next(there), next(here)
    answer = [each.view(torch.uint8) for each in both] if make is swapped else answered(ahead, asked, both)
    ahead.came(asked, answer)
    ahead.ended()
    behind.broke(task_of(here), verb, False, None)
    assert levelled([ahead, behind]) == [False, stays_behind]
    assert behind.is_resolved != stays_behind


def test_who_is_ahead_in_the_midst_of_a_task_leaves_nobody_behind() -> None:
    """That task runs again on both. And a rank of an earlier generation cannot tell, nor one that has just come."""
    ahead, behind = LastCollective(3), LastCollective(3)
    there, here = (swapped(torch.ones(2)) for _ in range(2))
    verb = next(there)
    ahead.came(verb, [])
    ahead.broke(task_of(there), verb, True, None)
    ahead.broken = None  # its task goes on, to a request that has failed
    behind.broke(task_of(here), next(here), False, None)
    assert levelled([ahead, behind]) == [False, False]
    assert levelled([ahead, LastCollective(2)]) == [False, None]
    assert levelled([ahead, None]) == [False, None]
