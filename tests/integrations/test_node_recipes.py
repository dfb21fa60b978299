"""Nodes of two ranks come and go under recipes that average, and whose rounds average, between nodes: all end equal."""

import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import nn
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.core.errors import AttachError, GossamerError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.node import NodeRanks
from gossamer.fabrics.liveness.store import SharedStore

pytestmark = pytest.mark.gang

FAR = 12  # steps before a node dies
SILENCE, PER_NODE, MOST = 3.0, 2, 3


class Outcome(NamedTuple):
    """What a rank has seen."""

    began: int
    model: list[float]
    present: tuple[int, ...]
    told: list[str]
    recipe: str
    optimizer: list[float]
    dropped: list[int]


def members(port: int, node: str, local: int) -> Members:
    """As `gossamer.members()` does it under a torchrun of this node's own, whose store is a part of the same one."""
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    own = SharedStore(PrefixStore(f"node/{node}", store), local, PER_NODE)
    return Members(store, None, MOST * PER_NODE, SILENCE, 2 * PER_NODE, NodeRanks(local, PER_NODE, own))


def learn_on_a_node(rank: int, size: int, port: int, recipe: str, silence: float, node: str, pipe: Connection) -> None:
    """A user's loop, until the test lets it end."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    group = members(port, node, rank % PER_NODE)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, nodes="members", deadline=30.0, buffers="average")
            began, end = comm.step, LastStep(comm, group.store, comm.rank)
            pipe.send((comm.rank, comm.step))
            while not end.is_over():
                x = torch.randn(4, 8)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                if comm.step == FAR:
                    group.store.raise_flag(f"far/{comm.rank}", "")
                time.sleep(0.005)
            comm.check_sync()
            moments = [float(optimizer.state[p]["exp_avg"].double().sum()) for p in model.parameters()]
            dropped = comm.dropped
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send(Outcome(began, flat.tolist(), comm.present, told, repr(comm.recipe), moments, dropped))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_on_a_node)


class Fleet:
    """Nodes of two ranks, and the list of members; a process is named by the number of its node and its local rank."""

    def __init__(self, learners: Callable[..., Learners], recipe: str, nodes: int = 2) -> None:
        self.store = hold()
        self.all = learners(nodes * PER_NODE, self.store.port, recipe, SILENCE)
        self.members = Members(self.store, None, MOST * PER_NODE, least=2 * PER_NODE, node=NodeRanks(0, PER_NODE))
        self.lives, self.seats = 0, dict[int, int]()
        for node in range(nodes):
            self.start(node)
        for node in range(nodes):
            assert self.hear(node) == 0
        ranks = [rank for node in range(nodes) for rank in self.ranks(node)]
        wait_for(lambda: self.members.store.are_there([f"far/{rank}" for rank in ranks]))

    def start(self, node: int) -> None:
        self.lives += 1
        for local in range(PER_NODE):
            self.all.start(node * PER_NODE + local, dies=f"{node}.{self.lives}")

    def hear(self, node: int) -> int:
        """The step at which a node begins."""
        steps = set[int]()
        for process in self.processes(node):
            came = self.all.hear(process)
            assert isinstance(came, tuple), came
            self.seats[node] = came[0] // PER_NODE
            steps.add(came[1])
        (step,) = steps
        return step

    def processes(self, node: int) -> range:
        return range(node * PER_NODE, node * PER_NODE + PER_NODE)

    def ranks(self, node: int) -> range:
        first = self.seats[node] * PER_NODE
        return range(first, first + PER_NODE)

    def lose(self, node: int, local: int, sees: tuple[int, ...]) -> Any:
        """Kill one rank of a node; returns what the other one says when it ends."""
        process, other = node * PER_NODE + local, node * PER_NODE + 1 - local
        self.all.processes[process].kill()
        self.all.processes[process].join()
        said = self.all.hear(other)
        self.all.processes[other].join(300.0)
        self.waits_for(sees)
        return said

    def is_hit(self, times: int, draw: random.Random) -> None:
        """Lose a node of three at a random moment and start it again, so many times."""
        for _ in range(times):
            time.sleep(draw.uniform(0.0, 0.3))
            node = draw.randrange(3)
            self.lose(node, draw.randrange(PER_NODE), tuple({0, 1, 2} - {node}))
            self.start(node)
            self.hear(node)

    def waits_for(self, nodes: tuple[int, ...]) -> None:
        ranks = tuple(sorted(rank for node in nodes for rank in self.ranks(node)))
        wait_for(lambda: self.members.latest().ranks == ranks, what=lambda: f"{self.members.latest()}")

    def ends(self) -> list[Outcome]:
        end_with(self.members.store, self.all.size)
        outcomes = [self.all.hear(process) for process in range(self.all.size)]
        assert all(isinstance(each, Outcome) for each in outcomes), outcomes
        return outcomes


AT_EVERY_STEP = ["qsgd", "topk", "powersgd", "gather(qsgd()) + diana()", "allreduce"]
ROUNDS = ["local_sgd(4)", "slowmo(4)", "scatter(qsgd()) + diloco(8)"]
QUICK = ["topk", "local_sgd(4)"]


@pytest.mark.parametrize(
    "recipe",
    [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in (*AT_EVERY_STEP, *ROUNDS)],
)
def test_a_node_is_killed_and_comes_back_and_all_ranks_end_equal(
    learners: Callable[..., Learners], recipe: str
) -> None:
    fleet = Fleet(learners, recipe)
    said = fleet.lose(1, local=1, sees=(0,))
    assert isinstance(said, GossamerError)
    assert "a rank of this node" in str(said) or "start the node again by its torchrun" in str(said)
    fleet.start(1)
    came = fleet.hear(1)
    assert came >= FAR
    outcomes = fleet.ends()
    for one in outcomes:
        assert one.present == (0, 1, 2, 3)
        assert one.model == outcomes[0].model
        assert one.recipe.startswith("nodes(")
        assert len(one.dropped) <= 2
        assert recipe not in AT_EVERY_STEP or one.optimizer == outcomes[0].optimizer
    gone = [rank for rank in range(4) if rank not in fleet.ranks(0)]
    for process in fleet.processes(0):
        told = outcomes[process].told
        assert all(any(f"rank {rank} is lost" in t for t in told) for rank in gone)
        assert all(any(f"rank {rank} is back" in t for t in told) for rank in gone)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qsgd", "topk", "local_sgd(4)"])
def test_nodes_killed_at_random_moments_leave_the_others_at_work(
    learners: Callable[..., Learners], recipe: str
) -> None:
    fleet = Fleet(learners, recipe, nodes=3)
    fleet.is_hit(5, random.Random(recipe))
    outcomes = fleet.ends()
    assert all(one.model == outcomes[0].model for one in outcomes)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("sgp", r"gossip\(per_node=2\) cannot go on without a lost rank"),
        ("gtopk", r"gtopk\(.*cannot go on without a lost rank; use allreduce\(\), gather\(\) or scatter\(\)"),
    ],
)
def test_what_nodes_cannot_go_on_with_is_refused_by_name(recipe: str, why: str) -> None:
    model = nn.Linear(2, 1)
    group = Members(HashStore(), None, 4, node=NodeRanks(0, 2))
    with pytest.raises(AttachError, match=why):
        gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, group, nodes="members")
