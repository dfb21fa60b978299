"""Learners that die and come back: the others lose no step, and all end with one model."""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.gang import PRELOADED, free_port
from tests.marked import PATIENCE, wait_for
from torch import nn
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

import gossamer
from gossamer.core.errors import GossamerError, PeerError
from gossamer.fabrics.liveness import store_server
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch import gloo
from gossamer.fabrics.torch.tickets import Tickets
from gossamer.schedules.pending_fragments import PendingFragment
from gossamer.schedules.round_closer import RoundCloser

pytestmark = pytest.mark.gang

DIES_AT = 10


class Learners:
    """Processes that train by a user's loop, each started by its number, and perhaps started again."""

    def __init__(
        self, size: int, port: int, recipe: str, silence: float = 20.0, loop: Callable[..., None] | None = None
    ) -> None:
        self.loop = loop or learn
        self.size, self.port, self.recipe, self.silence = size, port, recipe, silence
        self.pipes, self.processes = dict[int, Connection](), dict[int, Any]()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOADED, "tests.warm"])

    def start(self, rank: int, dies: str = "") -> None:
        ours, theirs = self._context.Pipe()
        args = (rank, self.size, self.port, self.recipe, self.silence, dies, theirs)
        self.pipes[rank], self.processes[rank] = ours, self._context.Process(target=self.loop, args=args, daemon=True)
        self.processes[rank].start()
        theirs.close()

    def hear(self, rank: int, seconds: float = PATIENCE) -> Any:
        assert self.pipes[rank].poll(seconds), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()


def die_at(moment: str, comm: Any) -> None:
    """Kill this process when it is there for the third time after some steps."""
    owner, name = {
        "computing": (comm.model[1], "forward"),
        "ticket drawn": (Tickets, "claim"),
        "in the exchange": (gloo, "all_reduce"),
        "landing": (PendingFragment, "write"),
    }[moment]
    before, times = getattr(owner, name), [0]

    def counting(*args: Any) -> Any:
        out = before(*args) if moment == "ticket drawn" else None
        times[0] += comm.step >= DIES_AT
        if times[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(*args) if moment != "ticket drawn" else out

    setattr(owner, name, counting)


UNCOMPARED = 8  # a round, by which collectives are no longer compared through the store before they begin


def freeze_in_a_round(comm: Any) -> None:
    """Close a round, and stand still before what was offered for it is averaged."""
    average = RoundCloser._average

    def freezing(closing: RoundCloser, part: Any, offer: Any, step: int) -> Any:
        if closing.latest.number == UNCOMPARED:
            os.kill(os.getpid(), signal.SIGSTOP)
        return average(closing, part, offer, step)

    RoundCloser._average = freezing  # type: ignore[method-assign]


def come_late(comm: Any) -> None:
    """Be in the first step until that round has closed without this rank, and then until its lane is woken."""
    layer = comm.model[1]
    forward = layer.forward

    def waiting(x: torch.Tensor) -> torch.Tensor:
        layer.forward = forward
        learner = comm.worker.live["learner"]
        wait_for(lambda: learner._closing.latest.number == UNCOMPARED and learner._closing.latest.closed)
        wait_for(lambda: comm.fabric.session.lanes["quorum"].thread.broken)
        return forward(x)

    layer.forward = waiting


def is_enough(group: Members) -> bool:
    try:
        return group.store.flag_is_up("enough")
    except RuntimeError:  # the store is gone; training tells
        return False


BEHAVIOURS = {"freezes in a round": freeze_in_a_round, "comes late": come_late}


def learn(rank: int, size: int, port: int, recipe: str, silence: float, dies: str, pipe: Connection) -> None:
    """A user's loop; it says when it is in, and in the end what it has seen."""
    torch.set_num_threads(1)
    torch.manual_seed(100 * rank + os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    told = list[str]()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
            pipe.send((comm.step, [p.pid for p in store_server._started]))
            if dies in BEHAVIOURS:
                BEHAVIOURS[dies](comm)
            elif dies:
                die_at(dies, comm)
            steps = [comm.step]
            while comm.step < 2 * DIES_AT or not is_enough(group):
                x = torch.randn(4, 8)
                optimizer.zero_grad()
                (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                steps.append(comm.step)
                if comm.step == DIES_AT:
                    with suppress(RuntimeError):  # the store is gone; training tells
                        group.store.raise_flag(f"far/{rank}", "")
                time.sleep(0.005)
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        pipe.send((steps, flat.tolist(), told, comm.present, [(p.step, p.lost, p.back) for p in comm.ledger.presences]))
    except GossamerError as error:
        pipe.send(error)


def made_by(**kinds: Any) -> Iterator[Callable[..., Learners]]:
    """Makes learners of one kind, and ends them with the test."""
    made = list[Learners]()

    def make(*args: Any) -> Learners:
        made.append(Learners(*args, **kinds))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by()


RECIPE = "scatter(qsgd(bits=8)) + quorum_rounds(4, quorum=2)"


def hold() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)


@pytest.mark.parametrize(
    "moment",
    ["computing", *(pytest.param(m, marks=pytest.mark.slow) for m in ("ticket drawn", "in the exchange", "landing"))],
)
def test_a_learner_dies_and_comes_back_and_the_others_lose_no_step(
    learners: Callable[..., Learners], moment: str
) -> None:
    store = hold()
    crew = learners(4, store.port, RECIPE)
    for rank in range(4):
        crew.start(rank, dies=moment if rank == 2 else "")
    for rank in range(4):
        assert crew.hear(rank)[0] == 0
    crew.processes[2].join(300.0)
    everybody = Members(store, 0, 4)  # each of whom takes its own time
    wait_for(lambda: everybody.store.are_there([f"far/{r}" for r in (0, 1, 3)]))
    crew.start(2)
    came, _ = crew.hear(2)
    assert came >= DIES_AT
    time.sleep(0.3)
    everybody.store.raise_flag("enough", "")
    outcomes = [crew.hear(rank) for rank in range(4)]
    others = [presences for rank, (*_, presences) in enumerate(outcomes) if rank != 2]
    assert came + 1 in [step for presences in others for step, _, back in presences if back == [2]]  # under way there
    for rank, (steps, flat, told, present, presences) in enumerate(outcomes):
        assert steps == [*range(steps[0], steps[0] + len(steps))]
        assert steps[0] == (came if rank == 2 else 0)
        assert present == (0, 1, 2, 3)
        assert flat == outcomes[0][1]
        if rank != 2:
            assert steps[-1] >= 2 * DIES_AT
            assert [lost for _, lost, _ in presences if lost] == [back for *_, back in presences if back] == [[2]]
            assert [t.partition(": ")[2] for t in told] == [
                "rank 2 is lost; the others go on, and it may come back",
                "rank 2 is back",
            ]


@pytest.mark.slow
def test_two_at_once_and_one_that_froze_and_wakes_up_come_back(learners: Callable[..., Learners]) -> None:
    store = hold()
    crew, everybody = learners(4, store.port, "decoupled_diloco(4)", 5.0), Members(store, 0, 4)
    for rank in range(4):
        crew.start(rank)
    for rank in range(4):
        crew.hear(rank)
    time.sleep(0.5)
    os.kill(crew.processes[3].pid, signal.SIGSTOP)
    for rank in (0, 1):
        crew.processes[rank].kill()
        crew.processes[rank].join()
    wait_for(lambda: everybody.latest().ranks == (2,), what=lambda: f"{everybody.latest()}, {everybody.beats()}")
    os.kill(crew.processes[3].pid, signal.SIGCONT)
    for rank in (0, 1):
        crew.start(rank)
        assert crew.hear(rank)[0] > 0
    time.sleep(3.0)
    everybody.store.raise_flag("enough", "")
    outcomes = [crew.hear(rank) for rank in range(4)]
    assert all(present == (0, 1, 2, 3) and flat == outcomes[0][1] for _, flat, _, present, _ in outcomes)
    steps, *_, presences = outcomes[2]
    assert steps == [*range(len(steps))]
    lost, back = (sorted(r for p in presences for r in p[i]) for i in (1, 2))
    assert lost == back == [0, 1, 3]


def test_who_is_late_for_a_round_that_froze_is_woken(learners: Callable[..., Learners]) -> None:
    """It has nothing to wait for, and no connection ends."""
    store = hold()
    crew = learners(2, store.port, "decoupled_diloco(4)", 2.0)
    crew.start(0, dies="comes late")
    crew.start(1, dies="freezes in a round")
    for rank in (0, 1):
        crew.hear(rank)
    everybody = Members(store, 0, 2)
    wait_for(lambda: everybody.latest().ranks == (0,))
    everybody.store.raise_flag("enough", "")
    steps, _, told, present, _ = crew.hear(0)
    assert steps == [*range(len(steps))]
    assert present == (0,)
    assert [t.partition(": ")[2] for t in told] == ["rank 1 is lost; the others go on, and it may come back"]


@pytest.mark.parametrize("recipe", ["decoupled_diloco(4)", "topk"])
def test_the_store_outlives_rank_0_and_without_it_all_are_told(learners: Callable[..., Learners], recipe: str) -> None:
    """Also where no rank waits long for another one."""
    crew = learners(2, free_port(), recipe)
    crew.start(0, dies="computing")
    crew.start(1)
    (_, (holder,)), _ = crew.hear(0), crew.hear(1)
    try:
        crew.processes[0].join(300.0)
        crew.start(0)
        came, started = crew.hear(0)
        assert came > 0
        assert not started
    finally:
        os.kill(holder, signal.SIGKILL)
    for rank in range(2):
        error = crew.hear(rank)
        assert isinstance(error, PeerError)
        assert "the store that holds the list of members does not answer" in str(error)


def test_who_trains_alone_is_told_that_the_store_is_gone(learners: Callable[..., Learners]) -> None:
    """It waits for nobody, and others could begin anew in another store."""
    crew = learners(2, free_port(), "local_sgd(4)")
    for rank in range(2):
        crew.start(rank)
    (_, (holder,)), _ = crew.hear(0), crew.hear(1)
    try:
        client = TCPStore("127.0.0.1", crew.port, None, False, timedelta(seconds=60), wait_for_workers=False)
        everybody = Members(client, 0, 2)
        crew.processes[1].kill()
        wait_for(lambda: everybody.latest().ranks == (0,))
    finally:
        os.kill(holder, signal.SIGKILL)
    error = crew.hear(0)
    assert isinstance(error, PeerError)
    assert "the store that holds the list of members does not answer" in str(error)


def test_what_a_lost_rank_owed_is_not_asked_of_a_store_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Members(HashStore(), 0, 2)

    def gone() -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(group.seats, "beats", gone)
    with pytest.raises(PeerError, match="the store that holds the list of members does not answer"):
        group.owed([1])


def test_a_recipe_that_cannot_go_on_is_refused() -> None:
    group = Members(HashStore(), 0, 2)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GossamerError, match=r"members\(\) with .*cannot go on without a lost rank.*decoupled_diloco"):
        gossamer.attach(model, optimizer, "ad_psgd", group)
    with pytest.raises(GossamerError, match="leave nodes out"):
        gossamer.attach(model, optimizer, "decoupled_diloco(4)", group, nodes=2)
    with pytest.raises(GossamerError, match="weight must be a number of 0 or more"):
        gossamer.attach(model, optimizer, "decoupled_diloco(4)", group, weight=-1)


def test_members_that_have_held_shards_train_a_whole_model() -> None:
    group, model = Members(hold(), 0, 1), nn.Linear(2, 1)
    group.by_shard = True  # as a model that FSDP2 shards has left it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gossamer.attach(model, optimizer, "decoupled_diloco(4)", group):
        assert not group.by_shard


def test_what_the_environment_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "4", "WORLD_SIZE": "4", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(GossamerError, match="set RANK to a number from 0 to 3"):
        gossamer.members()
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(GossamerError, match="MASTER_PORT is ''"):
        gossamer.members()
