"""Members come and go under recipes in which all ranks step together, and under gossip: the others go on, and end equal."""

import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import SLACK, wait_for
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members

pytestmark = pytest.mark.gang

FAR = 12  # steps before a rank dies
SILENCE = 3.0
LIMIT = 240.0  # seconds; a busy machine may take long, but what a test waits for comes


class Outcome(NamedTuple):
    """What a rank has seen."""

    steps: list[int]
    model: list[float]
    told: list[str]
    present: tuple[int, ...]
    longest: float  # seconds between the ends of two steps
    lost_residual: float
    dropped: list[int]


def learn_together(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop, up to a step that the test chooses."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(
                model, optimizer, recipe, group, deadline=30.0, buffers="average" if how else "local"
            )
            pipe.send(comm.step)
            steps, longest, last = [comm.step], 0.0, time.monotonic()
            end = LastStep(comm, group.store, rank)
            while not end.is_over():
                x = torch.randn(4, 8)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                steps.append(comm.step)
                longest, last = max(longest, time.monotonic() - last), time.monotonic()
                if comm.step == FAR:
                    group.store.raise_flag(f"far/{rank}", "")
                time.sleep(0.005)
            comm.check_sync()  # compares anchors too
            lost, dropped = comm.metrics()["lost_residual"], comm.dropped
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send(Outcome(steps, flat.tolist(), told, comm.present, longest, lost, dropped))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_together)


class Crew:
    """Three ranks that have trained for some steps, and the list of members."""

    def __init__(self, learners: Callable[..., Learners], recipe: str, how: str = "", size: int = 3) -> None:
        self.store = hold()
        self.size, self.how = size, how
        self.all = learners(size, self.store.port, recipe, SILENCE)
        self.members = Members(self.store, 0, size)
        for rank in range(size):
            self.all.start(rank, dies=how)
        for rank in range(size):
            assert self.all.hear(rank) == 0
        wait_for(lambda: self.members.store.are_there([f"far/{r}" for r in range(size)]))

    def lose(self, rank: int) -> None:
        self.all.processes[rank].kill()
        self.all.processes[rank].join()
        self.waits_for([r for r in range(self.size) if r != rank])

    def waits_for(self, ranks: list[int]) -> None:
        wait_for(lambda: self.members.latest().ranks == tuple(ranks), LIMIT, lambda: f"{self.members.latest()}")

    def comes(self, rank: int) -> int:
        self.all.start(rank, dies=self.how)
        came = self.all.hear(rank)
        assert isinstance(came, int), came
        return came

    def ends(self, ranks: list[int] | None = None) -> list[Outcome]:
        """Let these ranks end, or all, some steps after they are those that are present."""
        ranks = ranks or [*range(self.size)]
        end_with(self.members.store, len(ranks))
        outcomes = [self.all.hear(rank, LIMIT) for rank in ranks]
        assert all(isinstance(each, Outcome) for each in outcomes), outcomes
        return outcomes


STREAMING = "allreduce + streaming(6, fragments=2, delay=4)"
QUICK = ["allreduce", "topk", "local_sgd(4)", "sgp", STREAMING]
GOSSIP = ("sgp", "allreduce + gossip(symmetric())")  # who was behind goes on with the others' step
LONG = [
    "qsgd",
    "powersgd",
    "gather(qsgd()) + diana()",
    "gather(topk()) + ef21(eta=1.0)",
    "slowmo(4)",
    "bmuf(4, momentum=0.5)",
    "diloco(8)",
    "sparse_loco(4)",
    "streaming_diloco(8, delay=8)",
    "scatter(topk()) + error_feedback() + streaming(6, fragments=2, delay=2)",
    "allreduce + streaming(4, delay=0)",
    "allreduce + overlap_local_sgd(6, delay=4)",
    "allreduce + cocod(6)",
    "qsgd + delayed()",
    "allreduce + gossip(symmetric())",
]


@pytest.mark.parametrize("recipe", [*QUICK, *(pytest.param(r, marks=pytest.mark.slow) for r in LONG)])
def test_a_rank_dies_and_comes_back_and_all_end_with_one_model(learners: Callable[..., Learners], recipe: str) -> None:
    crew = Crew(learners, recipe)
    crew.lose(1)
    time.sleep(0.2)
    came = crew.comes(1)
    assert came >= FAR
    outcomes = crew.ends()
    for rank, one in enumerate(outcomes):
        assert one.present == (0, 1, 2)
        assert one.model == outcomes[0].model
        assert one.longest < SILENCE + 2 + SLACK
        assert all(after - before in (0, 1) for before, after in zip(one.steps, one.steps[1:])) or recipe in GOSSIP
        assert len(one.dropped) <= 2
        if rank != 1:
            assert any("rank 1 is lost" in t for t in one.told)
            assert any("rank 1 is back" in t for t in one.told)


def test_buffers_are_shared_on_among_those_who_are_left(learners: Callable[..., Learners]) -> None:
    crew = Crew(learners, "allreduce", "average")
    crew.lose(0)
    crew.comes(0)
    outcomes = crew.ends()
    assert all(one.model == outcomes[0].model for one in outcomes)


def test_what_a_lost_rank_still_owed_is_counted(learners: Callable[..., Learners]) -> None:
    crew = Crew(learners, "gather(topk(0.02)) + error_feedback()")
    time.sleep(1.5)
    crew.lose(2)
    outcomes = crew.ends([0, 1])
    assert all(one.lost_residual > 0 for one in outcomes)
    assert outcomes[0].model == outcomes[1].model


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topk", STREAMING])
def test_a_rank_that_froze_and_wakes_up_comes_back(learners: Callable[..., Learners], recipe: str) -> None:
    crew = Crew(learners, recipe)
    os.kill(crew.all.processes[2].pid, signal.SIGSTOP)
    crew.waits_for([0, 1])
    os.kill(crew.all.processes[2].pid, signal.SIGCONT)
    crew.waits_for([0, 1, 2])
    outcomes = crew.ends()
    assert all(one.present == (0, 1, 2) for one in outcomes)
    assert all(one.model == outcomes[0].model for one in outcomes)


EVERY = ["allreduce", "qsgd", "topk", "powersgd", "local_sgd(4)", "slowmo(4)", "diloco(8)", "sgp", STREAMING]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", EVERY)
def test_ranks_killed_at_random_moments_leave_the_others_at_work(
    learners: Callable[..., Learners], recipe: str
) -> None:
    crew, draw = Crew(learners, recipe), random.Random(recipe)
    for _ in range(6):
        time.sleep(draw.uniform(0.0, 0.3))
        rank = draw.randrange(3)
        crew.lose(rank)
        crew.comes(rank)
    outcomes = crew.ends()
    assert all(one.model == outcomes[0].model and one.longest < SILENCE + 2 + SLACK for one in outcomes)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("allreduce + eager(8)", r"eager\(8\) cannot go on without a lost rank"),
        ("backup(1)", r"cannot go on without a lost rank"),
        ("ad_psgd", r"cannot go on without a lost rank"),
        ("slowmo(4, sharded=True)", r"cannot go on without a lost rank; use .* without sharded"),
        ("gtopk", r"gtopk\(.*cannot go on without a lost rank; use allreduce\(\), gather\(\) or scatter\(\)"),
        ("accordion(epoch=100)", r"counts on the ranks of the start; leave the controller out"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(recipe: str, why: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(GossamerError, match=why):
        gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe, Members(HashStore(), 0, 2))
