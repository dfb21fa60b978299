"""Members that are told to leave hand over what they owe, and the others go on: nothing is lost, and no step is dropped."""

import os
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
from tests.marked import wait_for
from torch import Tensor, nn

import gossamer
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members

pytestmark = pytest.mark.gang

FAR = 10  # steps before anybody leaves
SILENCE = 20.0  # seconds; a test that waited for it would be seen


class Outcome(NamedTuple):
    """What a rank has seen."""

    step: int
    model: list[float]
    told: list[str]
    present: tuple[int, ...]
    lost_residual: float
    dropped: list[int]
    stopping: bool
    has_left: bool
    after: str  # what came of another step after it had left


def learn_until_told(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop, up to a signal, or to a step that the test chooses."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x = torch.randn(4, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
            pipe.send(comm.step)
            with comm.leaving_at(seconds=60):
                end = LastStep(comm, group.store, rank)
                while not comm.stopping and not end.is_over():
                    step()
                    if comm.step == FAR:
                        group.store.raise_flag(f"far/{rank}", "")
                    time.sleep(0.005)
            stopping, lost, dropped = comm.stopping, comm.metrics()["lost_residual"], comm.dropped
            done, has_left, after = comm.step, comm.has_left, ""
            if has_left:
                try:
                    step()
                except GossamerError as error:
                    after = str(error)
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send(Outcome(done, flat.tolist(), told, comm.present, lost, dropped, stopping, has_left, after))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_until_told)


class Crew:
    """Three ranks that have trained for some steps."""

    def __init__(self, learners: Callable[..., Learners], recipe: str, silence: float = SILENCE, size: int = 3) -> None:
        self.store, self.size = hold(), size
        self.all = learners(size, self.store.port, recipe, silence)
        self.members = Members(self.store, 0, size)
        for rank in range(size):
            self.all.start(rank)
        for rank in range(size):
            assert self.all.hear(rank) == 0
        wait_for(lambda: self.members.store.are_there([f"far/{r}" for r in range(size)]))

    def tell(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.all.processes[rank].pid, signal.SIGTERM)

    def outcome(self, rank: int) -> Outcome:
        found = self.all.hear(rank)
        assert isinstance(found, Outcome), found
        return found

    def ends(self, ranks: list[int]) -> list[Outcome]:
        end_with(self.members.store, len(ranks))
        return [self.outcome(rank) for rank in ranks]


QUICK = ["gather(topk(0.02)) + error_feedback()", "local_sgd(1000)", "sgp", "decoupled_diloco(8)"]
LONG = [
    "allreduce",
    "qsgd",
    "gather(topk(0.02)) + momentum_correction()",
    "powersgd",
    "gather(qsgd()) + diana()",
    "gather(topk()) + ef21(eta=1.0)",
    "slowmo(1000)",
    "diloco(1000)",
    "sparse_loco(30)",
    "gather(topk(0.02)) + error_feedback() + delayed()",
    "allreduce + overlap_local_sgd(30)",
    "allreduce + streaming(30, fragments=2, delay=15)",
    "scatter(topk(0.1)) + error_feedback() + streaming(12, fragments=2, delay=6)",
    "allreduce + gossip(symmetric())",
    "osgp",
    "decoupled_diloco(12)",
    "gather(topk(0.1)) + error_feedback() + quorum_rounds(12, quorum=2, fragments=2)",
]


@pytest.mark.parametrize("recipe", [*QUICK, *(pytest.param(r, marks=pytest.mark.slow) for r in LONG)])
def test_one_leaves_in_good_order_and_comes_back(learners: Callable[..., Learners], recipe: str) -> None:
    crew = Crew(learners, recipe)
    crew.tell(1)
    gone = crew.outcome(1)
    assert gone.stopping
    assert gone.has_left
    assert f"rank 1 has left the members after step {gone.step}" in gone.after
    crew.all.start(1)  # its seat is free, and the others let it in
    came = crew.all.hear(1)
    assert came >= gone.step
    outcomes = crew.ends([0, 1, 2])
    for one in outcomes:
        assert one.model == outcomes[0].model
        assert one.lost_residual == 0
        assert not one.stopping
    for one in (outcomes[0], outcomes[2]):
        assert [t.partition(": ")[2].partition(",")[0] for t in one.told] == ["rank 1 has left", "rank 1 is back"]
        assert len(one.dropped) <= 1  # when it came back


def test_two_leave_at_once_and_the_last_one_too(learners: Callable[..., Learners]) -> None:
    crew = Crew(learners, "gather(topk(0.02)) + error_feedback()")
    crew.tell(0, 2)
    first = [crew.outcome(rank) for rank in (0, 2)]
    assert all(one.has_left and one.lost_residual == 0 for one in first)
    wait_for(lambda: crew.members.latest().ranks == (1,))
    crew.tell(1)
    last = crew.outcome(1)
    assert last.stopping
    assert not last.has_left  # nobody goes on without it
    assert last.dropped == []
    assert last.lost_residual == 0
    assert last.present == (1,)


def test_all_leave_together_and_can_save(learners: Callable[..., Learners]) -> None:
    crew = Crew(learners, "local_sgd(50)")
    crew.tell(0, 1, 2)
    outcomes = [crew.outcome(rank) for rank in range(3)]
    assert all(one.stopping and one.lost_residual == 0 for one in outcomes)
    together = [one for one in outcomes if not one.has_left]
    assert together  # those whose signals came in time for the others' step
    assert all(one.model == together[0].model for one in together)


def test_one_leaves_while_another_dies(learners: Callable[..., Learners]) -> None:
    crew = Crew(learners, "gather(topk(0.02)) + error_feedback()")
    crew.tell(1)
    crew.all.processes[2].kill()
    gone = crew.outcome(1)
    assert gone.has_left
    wait_for(lambda: crew.members.latest().ranks == (0,))
    (left,) = crew.ends([0])
    assert left.present == (0,)
    said = sorted(t.partition(": ")[2].partition(",")[0].partition(";")[0] for t in left.told)
    assert said == ["rank 1 has left", "rank 2 is lost"]


# -- what was given is applied, owed or counted as lost ------------------------------------------------------------------


class Account(NamedTuple):
    """One process's sums, by element."""

    given: list[float]  # gradients of steps that were not dropped
    applied: list[float]  # N times the mean, over N ranks, of the steps that it has seen
    residual: list[float]
    step: int


def keep_account(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A loop that sums up what it gives and gets; `how` says at which step it dies."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Linear(40, 3, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given, applied = torch.zeros(120).double(), torch.zeros(120).double()

    def account() -> Account:
        (bucket,) = comm.worker.buckets
        residual, unit = bucket.memory.residual(bucket.states["memory"]) or (torch.zeros_like(given), 1.0)
        rate = 0.01 if bucket.memory.follows_rate else 1.0  # then `residual / unit` is in units of the update
        return Account(given.tolist(), applied.tolist(), (residual / (unit * rate)).tolist(), comm.step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
        pipe.send(comm.step)
        with comm.leaving_at(seconds=60):
            end = LastStep(comm, group.store, rank)
            while not comm.stopping and not end.is_over():
                x = torch.randn(4, 40).double()
                optimizer.zero_grad()
                loss = model(x).square().mean()
                (own,) = torch.autograd.grad(loss, [model.weight], retain_graph=True)
                loss.backward()
                if model.weight.grad is not None:
                    got = len(comm.present) * model.weight.grad.view(-1)
                    given, applied = given + own.view(-1), applied + got
                optimizer.step()
                if comm.step == FAR:
                    group.store.raise_flag(f"far/{rank}", "")
                if how and comm.step == int(how):
                    pipe.send(account())
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.002)
        out = account()
        comm.finish()
        pipe.send(out)


@pytest.fixture
def accountants() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=keep_account)


@pytest.mark.parametrize(
    "recipe",
    [
        "gather(topk(0.05)) + error_feedback()",
        pytest.param("gather(topk(0.05)) + error_feedback(units='update')", marks=pytest.mark.slow),
    ],
)
def test_all_that_was_given_is_applied_or_owed_or_counted_as_lost(
    accountants: Callable[..., Learners], recipe: str
) -> None:
    """By element: a rank is killed and comes back, and another one leaves in good order."""
    store = hold()
    crew, members = accountants(3, store.port, recipe, SILENCE), Members(store, 0, 3)
    for rank in range(3):
        crew.start(rank, dies=str(FAR + 5) if rank == 2 else "")
    for rank in range(3):
        assert crew.hear(rank) == 0
    killed: Account = crew.hear(2)
    crew.processes[2].join()
    crew.start(2)
    came = crew.hear(2)
    time.sleep(0.3)
    os.kill(crew.processes[1].pid, signal.SIGUSR1)
    left: Account = crew.hear(1)
    assert left.step > came
    end_with(members.store, 2)
    first, third = (crew.hear(rank) for rank in (0, 2))
    assert killed.residual != [0.0] * 120
    assert left.residual == [0.0] * 120
    given = summed(first.given, left.given, third.given, killed.given)
    seen = summed(first.applied, first.residual, third.residual)
    torch.testing.assert_close(seen + summed(killed.residual), given, rtol=0, atol=1e-6)
    assert (seen - given).norm() > 1e-3  # what was lost would be missed


def summed(*each: list[float]) -> Tensor:
    return torch.tensor(each, dtype=torch.float64).sum(0)
