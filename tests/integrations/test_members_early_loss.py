"""A rank that dies in the first collectives after members have met is missed at its broken connection, not by its silence."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.driver import NetworkDriver

pytestmark = pytest.mark.gang

SILENCE = 120.0  # longer than this test waits for anybody
FAR = 12


def die_in_comparison(number: int) -> None:
    """Kill this process when, after the members have met again, it is about to say what it does next for the `number`-th time."""
    compare = NetworkDriver._compare

    def dying(driver: NetworkDriver, group: Any, handle: Any, halt: Any) -> None:
        if group.collectives == number and handle.lane.name == "comm":
            os.kill(os.getpid(), signal.SIGKILL)
        compare(driver, group, handle, halt)

    NetworkDriver._compare = dying  # type: ignore[method-assign]


def learn(rank: int, size: int, port: int, recipe: str, silence: float, dies: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=60.0)
        pipe.send(comm.step)
        end = LastStep(comm, group.store, rank)
        while not end.is_over():
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            if comm.step == FAR:
                group.store.raise_flag(f"far/{rank}", "")
                if dies:
                    die_in_comparison(int(dies))
            time.sleep(0.005)
        comm.finish()
        pipe.send((comm.present, [p.detach().tolist() for p in model.parameters()]))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn)


@pytest.mark.parametrize("number", [1, 3])
def test_who_dies_where_ranks_compare_is_missed_at_once(learners: Callable[..., Learners], number: int) -> None:
    store = hold()
    crew, members = learners(4, store.port, "topk", SILENCE), Members(store, 0, 4)
    for rank in range(4):
        crew.start(rank, dies=str(number) if rank == 2 else "")
    for rank in range(4):
        assert crew.hear(rank) == 0
    wait_for(lambda: members.store.are_there([f"far/{r}" for r in range(4)]))
    crew.processes[1].kill()  # so the others meet, and rank 2 dies in that
    wait_for(lambda: members.latest().ranks == (0, 3), 60.0, lambda: f"{members.latest()}")
    end_with(members.store, 2)
    outcomes = [crew.hear(rank) for rank in (0, 3)]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == (0, 3)
