"""A rank that dies or freezes: every other one learns of it in time."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.fabrics.test_torch_failures import DEADLINE, failure
from tests.gang import Call, Gang, at_once
from tests.marked import SLACK

from gossamer.core import verbs
from gossamer.core.verbs import Compute, Program
from gossamer.fabrics.torch.fabric import TorchFabric

pytestmark = pytest.mark.gang


def killed(rank: int, size: int, victim: int, kind: str) -> tuple[str, str, float]:
    """One rank is killed in the middle of a step; the others are in a collective, or wait for a quorum."""
    fabric = TorchFabric(deadline=DEADLINE, check=2)

    def die() -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def collective() -> Program[None]:
        for _ in range(4):
            yield from verbs.all_reduce(torch.ones(1000))
        yield Compute(die, "die")
        yield from verbs.all_reduce(torch.ones(1000))

    def waiting() -> Program[None]:
        yield from verbs.all_reduce(torch.ones(1000))
        yield Compute(die, "die")
        yield from verbs.take_ticket("step 5")
        yield from verbs.wait_quorum("step 5", size)

    program = collective() if kind == "collective" else waiting()
    return failure(fabric, lambda: fabric.join(fabric.start(program, "embedding", step=5)))


@pytest.fixture(scope="module")
def survived() -> Iterator[Callable[[Any], list[Any]]]:
    cases = [(victim, kind) for victim in (0, 2) for kind in ("collective", "quorum")]
    with at_once(3, {case: Call(killed, case, lost=case[:1]) for case in cases}) as outcome_of:
        yield outcome_of


@pytest.mark.parametrize("kind", ["collective", "quorum"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_every_other_in_time(survived: Callable[[Any], list[Any]], kind: str, victim: int) -> None:
    for rank, outcome in enumerate(survived((victim, kind))):
        if rank != victim:
            name, text, seconds = outcome
            assert name == "PeerError"
            assert f"rank {rank} of 3: step 5, 'embedding'" in text
            assert seconds < DEADLINE + 2.0 + SLACK
            # Rank 0 hosts the store: with it gone nobody can ask where the others are.
            assert ("No answer from rank 2:" if victim else "The store does not answer: the machine at") in text
            assert ("Check the end of its log" if victim else "(usually rank 0) has ended") in text


def frozen(rank: int, size: int, pid: int = 0) -> tuple[str, str, float] | None:
    """The store's host stops without closing a connection, as behind a cut cable."""
    fabric = TorchFabric(deadline=2.0, check=0)
    pids = fabric.run(verbs.all_reduce(torch.tensor([os.getpid() if rank == 0 else 0])))
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        return failure(fabric, lambda: fabric.run(verbs.all_reduce(torch.ones(4))))
    finally:
        os.kill(int(pids), signal.SIGKILL)


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    gang = Gang(2)
    try:
        _, (name, text, seconds) = gang.run(frozen, lost=[0])
    finally:
        gang.close()
    assert name == "PeerError"
    assert "The store does not answer: the machine at" in text
    assert "(usually rank 0) is frozen" in text
    assert seconds < 2.0 + 2.0 + SLACK
