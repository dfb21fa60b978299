"""Weights under members(): every mean is that of those who are there, each in proportion to its weight."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members

pytestmark = pytest.mark.gang

SLOPES, WEIGHTS = (1.0, 4.0, 7.0), (1.0, 2.0, 5.0)  # of each rank's loss
FAR = 12


def mean(ranks: tuple[int, ...]) -> float:
    return sum(SLOPES[r] * WEIGHTS[r] for r in ranks) / sum(WEIGHTS[r] for r in ranks)


def learn_a_slope(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """Each rank's gradient is its slope, so the model says how often which mean was taken."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0, weight=WEIGHTS[rank])
        pipe.send(comm.step)
        moves, last = list[tuple[tuple[int, ...], float]](), float(model.weight)
        end = LastStep(comm, group.store, rank)
        while not end.is_over():
            retries = comm.retries
            optimizer.zero_grad()
            model(torch.tensor([[SLOPES[rank]]], dtype=torch.float64)).sum().backward()
            optimizer.step()
            if comm.ends_round and comm.retries == retries:
                moves.append((comm.present, last - float(model.weight)))
                last = float(model.weight)
            if comm.step == FAR:
                group.store.raise_flag(f"far/{rank}", "")
            time.sleep(0.005)
        comm.finish()
        pipe.send(moves)
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_a_slope)


@pytest.mark.parametrize(("recipe", "steps"), [("allreduce", 1), ("local_sgd(4)", 4)])
def test_a_mean_weighs_those_who_are_there(learners: Callable[..., Learners], recipe: str, steps: int) -> None:
    store = hold()
    crew, members = learners(3, store.port, recipe, 5.0), Members(store, 0, 3)
    for rank in range(3):
        crew.start(rank)
    for rank in range(3):
        assert crew.hear(rank) == 0
    wait_for(lambda: members.store.are_there([f"far/{r}" for r in range(3)]))
    crew.processes[1].kill()
    crew.processes[1].join()
    wait_for(lambda: members.latest().ranks == (0, 2))
    crew.start(1)
    came = crew.hear(1)
    assert came >= FAR
    end_with(members.store, 3)
    for rank in range(3):
        moves = crew.hear(rank)
        assert isinstance(moves, list), moves
        means = [mean((0, 1, 2)), mean((0, 2))]
        of = {present for present, _ in moves}
        assert of == ({(0, 1, 2), (0, 2)} if rank != 1 else {(0, 1, 2)})
        # What one round moved is either mean, but in the round in which one is back, which has taken fewer steps in it.
        strange = [moved for _, moved in moves if not any(abs(moved / steps - m) < 1e-9 for m in means)]
        assert len(strange) <= (1 if steps > 1 else 0), moves
        assert sum(abs(moved / steps - means[0]) < 1e-9 for _, moved in moves) > 5
        assert rank == 1 or any(abs(moved / steps - means[1]) < 1e-9 for _, moved in moves)


def test_gossip_refuses_unequal_weights(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew = learners(3, store.port, "sgp", 5.0)
    for rank in range(3):
        crew.start(rank)
    for rank in range(3):
        error = crew.hear(rank)
        assert isinstance(error, GossamerError)
        assert "with weight=" in str(error)
