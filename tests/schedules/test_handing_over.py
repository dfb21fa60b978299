"""Who leaves hands over what it owes once, wherever a meeting fails: never to nobody, and never twice."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.core.verbs import Program
from gossamer.fabrics.sim import simulate
from gossamer.schedules.handing_over import HandingOver
from gossamer.simulate import Replica, replicas

RANKS, LEAVER = 3, 1


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_residuals(absent: int | None = None) -> list[Replica]:
    """Ranks that owe something, but for one that has just come."""
    ranks = replicas("gather(topk(0.1)) + error_feedback() + quorum_rounds(4)", lambda: nn.Linear(5, 3), sgd, RANKS)
    generator = torch.Generator().manual_seed(7)
    for number, replica in enumerate(ranks):
        for bucket in replica.worker.buckets if number != absent else []:
            bucket.states["memory"]["residual"] = torch.randn(bucket.layout.numel, generator=generator)
    return ranks


def owed(replica: Replica) -> Tensor:
    (bucket,) = replica.worker.buckets
    return bucket.states["memory"].get("residual", torch.zeros(bucket.layout.numel))


def total(ranks: list[Replica]) -> Tensor:
    return torch.stack([owed(replica) for replica in ranks]).sum(0)


def handing(ranks: list[Replica]) -> list[HandingOver]:
    made = [HandingOver(replica.worker.loop) for replica in ranks]
    made[LEAVER].leaves = True
    return made


def cut(program: Program[list[int]], requests: int, answers: int) -> Program[list[int] | None]:
    """Run a program as where its connection breaks: so many requests, of which so many are answered."""
    answer: Any = None
    for number in range(requests):
        try:
            verb = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = yield verb
        if number >= answers:
            break
    else:
        with suppress(StopIteration):
            program.send(answer)
    program.close()
    return None


def meet(
    made: list[HandingOver], requests: int = 99, answers: tuple[int, ...] = (99, 99, 99)
) -> list[list[int] | None]:
    said = [each.says() for each in made]
    programs = [cut(each.meet(said), requests, n) for each, n in zip(made, answers, strict=True)]
    return simulate(programs).results


@pytest.mark.parametrize("absent", [None, 0])
def test_those_who_stay_take_on_equal_parts(absent: int | None) -> None:
    ranks = with_residuals(absent)
    before, third = total(ranks), owed(ranks[2]) + owed(ranks[LEAVER]) / 2
    assert meet(handing(ranks)) == [[LEAVER]] * RANKS
    assert not owed(ranks[LEAVER]).any()
    torch.testing.assert_close(owed(ranks[2]), third)
    torch.testing.assert_close(total(ranks), before)


# One sum of debts, then two by which all learn that all are there. The first of them decides.
@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        (1, (1, 0, 1)),
        (2, (1, 1, 1)),
        (2, (2, 1, 1)),
        (2, (1, 2, 1)),
        (2, (1, 1, 2)),
        (3, (3, 2, 2)),
        (3, (2, 2, 2)),
        (3, (2, 3, 2)),
    ],
)
def test_wherever_a_meeting_breaks_nothing_is_lost_or_taken_on_twice(requests: int, answers: tuple[int, ...]) -> None:
    ranks = with_residuals()
    before, made = total(ranks), handing(ranks)
    meet(made, requests, answers)
    assert meet(made) == [[LEAVER]] * RANKS
    assert not owed(ranks[LEAVER]).any()
    torch.testing.assert_close(total(ranks), before)


def test_where_all_leave_nothing_is_handed_over() -> None:
    ranks = with_residuals()
    before, made = [owed(replica).clone() for replica in ranks], handing(ranks)
    for each in made:
        each.leaves = True
    assert meet(made) == [[]] * RANKS
    assert all(torch.equal(owed(replica), kept) for replica, kept in zip(ranks, before, strict=True))
