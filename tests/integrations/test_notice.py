"""A signal on one rank stops all of them after the same step; they save, and go on from there to the bit."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations import sharded
from tests.integrations.loops import DEADLINE, SEED, same
from torch import Tensor, nn
from torch.distributed import HashStore

import gossamer
from gossamer.core.errors import AttachError, PeerError
from gossamer.data.parts import Parts
from gossamer.fabrics.liveness.heartbeat import RankStatus
from gossamer.fabrics.liveness.notice import Notice
from gossamer.fabrics.liveness.store import SharedStore
from gossamer.integrations.parting import PartingAtOwnPace

MOST = 3000  # steps; a run that nobody stops would be seen


def fresh(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, gossamer.attach(model, optimizer, recipe, seed=SEED, deadline=DEADLINE)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * comm.step + comm.rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def ended(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> Tensor:
    for _ in range(10):
        step(model, optimizer, comm)
    comm.finish()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def told_at(rank: int, size: int, recipe: str, moments: list[int], path: str) -> list[tuple[int, bool, bool]]:
    """For each moment: the step after which this rank stopped, whether its own was loaded, and led where the unbroken run did."""
    out = list[tuple[int, bool, bool]]()
    for seed in moments:
        dice = random.Random(seed)
        victim, number = dice.randrange(size), dice.choice([signal.SIGTERM, signal.SIGUSR1])
        alarm = threading.Timer(dice.uniform(0.0, 0.4), os.kill, (os.getpid(), number))
        model, optimizer, comm = fresh(recipe)
        with comm.leaving_at(seconds=120):
            if rank == victim:
                alarm.start()
            while comm.step < MOST and not comm.stopping:
                step(model, optimizer, comm)
                time.sleep(0.001 * dice.random() * (rank + 1))
            gossamer.checkpoint.save(comm, f"{path}/{seed}", {"told": rank == victim})
        stopped, unbroken = comm.step, ended(model, optimizer, comm)
        model, optimizer, comm = fresh(recipe)
        extra = gossamer.checkpoint.load(comm, f"{path}/{seed}")
        out.append((stopped, extra["told"] is (rank == victim), same(unbroken, ended(model, optimizer, comm))))
    return out


def _all_stop_alike(gang: Gang, recipe: str, moments: list[int], path: Path) -> None:
    for ranks in zip(*gang.run(told_at, recipe, moments, str(path), timeout=400), strict=True):
        assert len({stopped for stopped, _, _ in ranks}) == 1
        assert ranks[0][0] < MOST
        assert all(loaded and bit_equal for _, loaded, bit_equal in ranks)


@pytest.mark.gang
@pytest.mark.parametrize(("recipe", "moments"), [("qsgd", [1, 2]), ("local_sgd(8)", [3])])
def test_all_ranks_stop_after_the_same_step(gang2: Gang, recipe: str, moments: list[int], tmp_path: Path) -> None:
    _all_stop_alike(gang2, recipe, moments, tmp_path)


@pytest.mark.gang
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qsgd", "local_sgd(8)"])
def test_all_ranks_stop_after_the_same_step_at_twenty_moments(gang4: Gang, recipe: str, tmp_path: Path) -> None:
    _all_stop_alike(gang4, recipe, [*range(20)], tmp_path)


# -- models that FSDP2 shards ----------------------------------------------------------------------------------------------


def told_shards(rank: int, size: int, victims: list[int], path: str) -> list[tuple[int, bool]]:
    """For each victim: the step after which this rank stopped, and whether what it saved led where the unbroken run did."""
    out, mesh = list[tuple[int, bool]](), sharded.mesh_of(2)
    replica, shard = divmod(rank, 2)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> None:
        optimizer.zero_grad()
        sharded.loss_of(model, replica, comm.step, shard).backward()
        optimizer.step()

    def ended(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Any) -> list[Tensor]:
        for _ in range(4):
            train(model, optimizer, comm)
        return [sharded.full(p) for p in model.parameters()]

    for victim in victims:
        with sharded.attached("qsgd", mesh) as (model, optimizer, comm):
            assert comm.parts == Parts((1.0,) * size, rank)  # each shard takes samples of its own
            with comm.leaving_at(seconds=120):
                while comm.step < MOST and not comm.stopping:
                    train(model, optimizer, comm)
                    if rank == victim and comm.step == 3:
                        os.kill(os.getpid(), signal.SIGTERM)
                gossamer.checkpoint.save(comm, f"{path}/{victim}")
            stopped, unbroken = comm.step, ended(model, optimizer, comm)
        with sharded.attached("qsgd", mesh) as (model, optimizer, comm):
            gossamer.checkpoint.load(comm, f"{path}/{victim}")
            again = ended(model, optimizer, comm)
            out.append((stopped, all(torch.equal(a, b) for a, b in zip(unbroken, again, strict=True))))
    return out


@pytest.mark.gang
def test_all_shards_of_all_replicas_stop_after_the_same_step(gang4: Gang, tmp_path: Path) -> None:
    for ranks in zip(*gang4.run(told_shards, [1, 2], str(tmp_path), timeout=400), strict=True):
        assert len({stopped for stopped, _ in ranks}) == 1
        assert 3 <= ranks[0][0] < MOST
        assert all(bit_equal for _, bit_equal in ranks)


# -- signals in one process ------------------------------------------------------------------------------------------------


def test_a_second_signal_acts_as_before_and_so_do_all_afterwards() -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        model, optimizer, comm = fresh("allreduce")
        with comm, comm.leaving_at(seconds=60):
            step(model, optimizer, comm)
            assert not comm.stopping
            os.kill(os.getpid(), signal.SIGUSR1)
            assert comm.stopping
            assert not heard
            os.kill(os.getpid(), signal.SIGUSR1)
            assert comm.stopping
            assert heard == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert len(heard) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_in_a_save_lets_it_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, comm = fresh("allreduce")
    with comm, comm.leaving_at(seconds=60):
        step(model, optimizer, comm)
        collect = comm._state_to_save
        monkeypatch.setattr(comm, "_state_to_save", lambda: (os.kill(os.getpid(), signal.SIGTERM), collect())[1])
        gossamer.checkpoint.save(comm, tmp_path / "step1")
        monkeypatch.undo()
        assert comm.stopping
        assert str(gossamer.checkpoint.resume(comm, tmp_path)) == f"resumed from {tmp_path}/step1"


def test_a_notice_that_is_shorter_than_a_save_is_said_with_the_time(tmp_path: Path) -> None:
    _, _, comm = fresh("allreduce")
    with (
        comm,
        comm.leaving_at(seconds=1e-6),
        pytest.warns(UserWarning, match=r"a save took [\d.e-]+ seconds, and a notice of 1e-06"),
    ):
        gossamer.checkpoint.save(comm, tmp_path / "step0")


def test_what_cannot_be_watched_is_refused() -> None:
    _, _, comm = fresh("allreduce")
    said = list[str]()

    def enter() -> None:
        try:
            with comm.leaving_at(seconds=9):
                pass
        except AttachError as error:
            said.append(str(error))

    with comm:
        with pytest.raises(AttachError, match="seconds must be above 0, got 0"), comm.leaving_at(seconds=0):
            pass
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        enter()
    assert [text[:40] for text in said] == [
        "signals can be watched in the main threa",
        "comm.leaving_at() was entered before: en",
    ]


def test_a_rank_of_a_node_that_is_a_member_is_refused() -> None:
    _, _, comm = fresh("allreduce")
    fabric = SimpleNamespace(members=SimpleNamespace(node=SimpleNamespace(size=2)))
    with comm:
        comm._steps.parting = PartingAtOwnPace(SimpleNamespace(worker=comm.worker, fabric=fabric))
        with pytest.raises(AttachError, match="nodes of several ranks is not supported yet"), comm.leaving_at(9):
            pass


# -- ranks that do not answer ----------------------------------------------------------------------------------------------


def told() -> tuple[Notice, SharedStore, Any]:
    """A rank of two that was told to stop; the other one is not there."""
    store = SharedStore(HashStore(), 0, 2)
    pulse: Any = SimpleNamespace(store=store, lost=None, deadline=0.05, hurry=lambda: None)
    notice = Notice(pulse)
    assert not notice.may_stop(6)
    notice.received = signal.SIGTERM
    pulse.each_time()
    return notice, store, pulse


def test_a_rank_that_does_not_say_its_step_is_named() -> None:
    notice, _, _ = told()
    with pytest.raises(PeerError, match=r"since rank 1 did not say a step within 0\.05 seconds: start all ranks"):
        notice.may_stop(7)


def test_a_store_that_is_gone_is_no_reason_to_wait() -> None:
    notice, _, pulse = told()
    pulse.lost, pulse.deadline = RuntimeError("gone"), 300.0
    with pytest.raises(PeerError, match="agreed on, since the store does not answer: start all ranks again"):
        notice.may_stop(7)


def test_nobody_waits_for_a_rank_whose_loop_has_ended() -> None:
    notice, store, pulse = told()
    other: Any = SimpleNamespace(store=SharedStore(store.raw, 1, 2), lost=None, deadline=0.05, hurry=lambda: None)
    loop = Notice(other)
    with loop.on_signals():
        assert not loop.may_stop(8)
    pulse.each_time()
    assert [notice.may_stop(step) for step in (8, 9)] == [False, True]


def test_all_stop_after_the_latest_step_and_who_has_left_is_not_asked() -> None:
    notice, store, pulse = told()
    store.raise_flag("notice/1", "9")
    pulse.each_time()
    assert [notice.may_stop(step) for step in (6, 7, 8, 9)] == [False, False, False, True]
    notice, store, pulse = told()
    store.raise_flag("pulse/1", RankStatus(0, "left").write())
    pulse.each_time()
    assert notice.may_stop(7)


WITHOUT = """
import os, signal
del signal.SIGUSR1
import torch
import gossamer
model = torch.nn.Linear(2, 1)
with gossamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk") as comm, comm.leaving_at(seconds=9):
    os.kill(os.getpid(), signal.SIGTERM)
    print(comm.stopping)
"""


def test_a_system_without_the_second_signal_has_the_first() -> None:
    """Windows: the library could not be imported."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
