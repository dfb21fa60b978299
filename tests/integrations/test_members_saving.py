"""Those who are present save one checkpoint together, also where one dies in the midst of it; any number can go on from it."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.loops import flat
from tests.integrations.test_members import Learners, hold, made_by
from tests.marked import wait_for
from torch import nn
from torch.distributed import TCPStore

import gossamer
from gossamer.checkpoints import folder as dcp_folder
from gossamer.core.errors import CheckpointError, GossamerError
from gossamer.core.verbs import Program
from gossamer.fabrics.liveness.members import Members
from gossamer.integrations import checkpoint, consensus
from gossamer.integrations.shared import SharedBuffers
from gossamer.runtime import Worker

pytestmark = pytest.mark.gang

EVERY, DEADLY = 10, 20  # steps between two saves, and the step of the one in which ranks die
RECIPE = "gather(topk(0.1)) + error_feedback()"


class Outcome(NamedTuple):
    """What a rank has seen."""

    resumed: str
    began: int
    step: int
    first: list[float]  # the model before the first step
    model: list[float]
    told: list[str]


def die_in_the_save(comm: gossamer.Communicator) -> None:
    """Kill this process when its part of a checkpoint is written, and the others do not know it yet."""
    write = dcp_folder._Job.write

    def dying(job: dcp_folder._Job, described: list[dcp_folder.Facts]) -> dcp_folder.Facts:
        facts = write(job, described)
        if comm.step == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return facts

    dcp_folder._Job.write = dying  # type: ignore[method-assign]


def die_in_the_consensus(comm: gossamer.Communicator) -> None:
    """Kill this process in a save, when all have voted and the others wait for its model."""
    swap_in = consensus.swap_in

    def dying(worker: Worker, shared: SharedBuffers) -> Program[None]:
        if comm.step == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return swap_in(worker, shared)

    consensus.swap_in = dying


DEATHS = {"dies": die_in_the_save, "dies in the consensus": die_in_the_consensus}


def learn_and_save(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop that saves now and then; `how` names the folder, and whether this rank dies in a save."""
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    folder, _, end = how.partition(" ")
    group = gossamer.members(silence)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
            resumed = gossamer.checkpoint.resume(comm, folder)
            if end:
                DEATHS[end](comm)
            began, first = comm.step, flat(model).tolist()
            pipe.send(began)
            with comm.leaving_at(seconds=60):
                end = LastStep(comm, group.store, rank, EVERY)
                while not comm.stopping and not end.is_over():
                    x = torch.randn(4, 8)
                    optimizer.zero_grad()
                    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
                    optimizer.step()
                    if comm.stopping or comm.step % EVERY == 0:
                        gossamer.checkpoint.save(comm, f"{folder}/step{comm.step}", {"size": len(comm.present)})
                    time.sleep(0.005)
            step = comm.step
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        pipe.send(Outcome(str(resumed), began, step, first, flat(model).tolist(), told))
    except GossamerError as error:
        pipe.send(error)


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_and_save)


class Run(NamedTuple):
    """Ranks of one run, and their store."""

    all: Learners
    members: Members
    store: TCPStore

    def ends(self, ranks: list[int]) -> list[Outcome]:
        """Let these ranks end at a save, some steps after they are those that are present."""
        end_with(self.members.store, len(ranks))
        outcomes = [self.all.hear(rank) for rank in ranks]
        assert all(isinstance(each, Outcome) for each in outcomes), outcomes
        return outcomes


def start(
    learners: Callable[..., Learners],
    size: int,
    folder: Path,
    recipe: str,
    dying: tuple[int, ...] = (),
    how: str = "dies",
) -> Run:
    store = hold()
    run = Run(learners(size, store.port, recipe, 5.0), Members(store, 0, size), store)
    for rank in range(size):
        run.all.start(rank, dies=f"{folder}{f' {how}' if rank in dying else ''}")
    return run


def slow(recipe: str, how: str = "dies") -> object:
    return pytest.param(recipe, how, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        (RECIPE, "dies"),
        slow("local_sgd(5)"),
        slow("local_sgd(8)", "dies in the consensus"),  # in the midst of a round
        slow("allreduce + streaming(6, delay=4)"),
    ],
)
def test_those_who_are_left_save_and_any_number_goes_on(
    learners: Callable[..., Learners], recipe: str, how: str, tmp_path: Path
) -> None:
    run = start(learners, 3, tmp_path, recipe, (2,), how)
    for rank in range(3):
        assert run.all.hear(rank) == 0
    run.all.processes[2].join(300.0)
    wait_for(lambda: (tmp_path / f"step{DEADLY}" / ".metadata").is_file())
    run.all.start(2, dies=str(tmp_path))
    came = run.all.hear(2)
    assert came >= DEADLY
    wait_for(lambda: (tmp_path / f"step{(came // EVERY + 2) * EVERY}" / ".metadata").is_file())
    outcomes = run.ends([0, 1, 2])
    last = outcomes[0]
    assert all((one.step, one.model) == (last.step, last.model) for one in outcomes)
    assert (
        outcomes[2].resumed
        == f"came to others that are at work, and has their state: nothing was loaded from {tmp_path}"
    )
    for size in (2, 4):
        again = start(learners, size, tmp_path, recipe)
        assert {again.all.hear(rank) for rank in range(size)} == {last.step}
        outcomes = again.ends([*range(size)])
        for one in outcomes:
            assert one.resumed == f"resumed from {tmp_path}/step{last.step}"
            assert one.first == last.model
            assert one.model == outcomes[0].model
        last = outcomes[0]


def test_where_all_die_in_a_save_it_is_passed_over(learners: Callable[..., Learners], tmp_path: Path) -> None:
    run = start(learners, 2, tmp_path, RECIPE, dying=(0, 1))
    for rank in range(2):
        assert run.all.hear(rank) == 0
        run.all.processes[rank].join(300.0)
    again = start(learners, 3, tmp_path, RECIPE)
    assert {again.all.hear(rank) for rank in range(3)} == {EVERY}
    for one in again.ends([0, 1, 2]):
        assert one.resumed.endswith(f"/step{EVERY}; passed over, since their saves were cut off: step{DEADLY}")


def test_who_leaves_saves_nothing_and_the_others_do(learners: Callable[..., Learners], tmp_path: Path) -> None:
    run = start(learners, 3, tmp_path, RECIPE)
    for rank in range(3):
        assert run.all.hear(rank) == 0
    wait_for(lambda: (tmp_path / f"step{EVERY}" / ".metadata").is_file())
    os.kill(run.all.processes[1].pid, signal.SIGTERM)
    gone = run.all.hear(1)
    assert any("it has left the members, and the others have what it owed: they save" in t for t in gone.told)
    wait_for(lambda: (tmp_path / f"step{(gone.step // EVERY + 1) * EVERY}" / ".metadata").is_file())
    outcomes = run.ends([0, 2])
    assert outcomes[0].model == outcomes[1].model


def test_what_cannot_be_saved_together_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for recipe, keywords, why in (
        ("allreduce", {"wait": False}, "leave wait out"),
        ("decoupled_diloco(4)", {}, "save one file per rank"),
    ):
        store = hold()
        with (
            gossamer.attach(model, optimizer, recipe, Members(store, 0, 1)) as comm,
            pytest.raises(CheckpointError, match=why),
        ):
            gossamer.checkpoint.save(comm, tmp_path / "step0", **keywords)


def test_what_another_run_has_saved_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    """Of this one, a step that is taken again is saved already."""

    def run(resumes: bool) -> None:
        model, optimizer = fresh()
        with gossamer.attach(model, optimizer, "allreduce", Members(hold(), 0, 1)) as comm:
            if resumes:
                gossamer.checkpoint.resume(comm, tmp_path)
            else:
                step(model, optimizer)
            for _ in range(2):
                gossamer.checkpoint.save(comm, tmp_path / "step1")

    run(resumes=False)
    run(resumes=True)
    with pytest.raises(
        CheckpointError, match="step1 holds a checkpoint already; save each checkpoint to its own folder"
    ):
        run(resumes=False)


def learn_and_resume(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop that resumes from a folder (`how`). Rank 0 is slow to read it, and rank 2 asks to be let in meanwhile."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    group = gossamer.members(silence, least=2, most=size, store=f"127.0.0.1:{port}")
    held_in = checkpoint._held_in

    def slowly(folder: Path) -> dict[str, Any]:
        if rank == 0:
            wait_for(lambda: 2 in group.seats.beats())
            time.sleep(4.0)
        return held_in(folder)

    checkpoint._held_in = slowly
    model, optimizer = fresh()
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=60.0)
        resumed = gossamer.checkpoint.resume(comm, how)
        began, end = comm.step, LastStep(comm, group.store, rank)
        while not end.is_over():
            step(model, optimizer)
            time.sleep(0.005)
        comm.finish()
        pipe.send((str(resumed).partition(how)[0], began, flat(model).tolist(), comm.present))
    except GossamerError as error:
        pipe.send(error)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def resumers() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_and_resume)


def test_who_comes_while_the_others_load_a_checkpoint_waits_for_their_first_step(
    resumers: Callable[..., Learners], tmp_path: Path
) -> None:
    model, optimizer = fresh()
    with gossamer.attach(model, optimizer, "topk") as comm:
        for _ in range(7):
            step(model, optimizer)
        gossamer.checkpoint.save(comm, tmp_path / "step7")
    store = hold()
    crew, members = resumers(3, store.port, "topk", 5.0), Members(store, 0, 3)
    for rank in (0, 1):
        crew.start(rank, dies=str(tmp_path))
    wait_for(lambda: members.latest().ranks == (0, 1))
    crew.start(2, dies=str(tmp_path))
    wait_for(lambda: members.latest().ranks == (0, 1, 2))
    end_with(members.store, 3)
    outcomes = [crew.hear(rank) for rank in range(3)]
    assert all(isinstance(each, tuple) for each in outcomes), outcomes
    assert [said.partition(" ")[0] for said, *_ in outcomes] == ["resumed", "resumed", "came"]
    assert [began for _, began, *_ in outcomes][:2] == [7, 7]
    assert outcomes[2][1] > 7
    assert all(each[2:] == (outcomes[0][2], (0, 1, 2)) for each in outcomes)
