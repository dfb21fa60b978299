"""Nodes that hold the shards of one model save one checkpoint together, and go on from it to the bit."""

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.integrations.sharded import adamw, cut, dense, full, loss_of
from tests.integrations.test_members import Learners, hold, made_by
from tests.integrations.test_node_recipes import PER_NODE, SILENCE
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

import gossamer
from gossamer.checkpoints import folder as dcp_folder
from gossamer.core.errors import GossamerError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.node import NodeRanks
from gossamer.fabrics.liveness.store import SharedStore

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]

EVERY, LAST = 5, 13  # a save is within a round of four steps, and at its end; and the step at which the runs end
LONG = 240.0  # seconds


class Outcome(NamedTuple):
    """What a rank has seen."""

    rank: int
    resumed: str
    began: int
    first: list[float]  # the model before the first step
    model: list[float]  # and after the last one, before all agree on one
    present: tuple[int, ...]


def die_in_the_save(comm: gossamer.Communicator) -> None:
    """Kill this process when its part of the first checkpoint is written, and the others do not know it yet."""
    write = dcp_folder._Job.write

    def dying(job: dcp_folder._Job, described: list[dcp_folder.Facts]) -> dcp_folder.Facts:
        facts = write(job, described)
        os.kill(os.getpid(), signal.SIGKILL)
        return facts

    dcp_folder._Job.write = dying  # type: ignore[method-assign]


def learn_and_save(rank: int, size: int, port: int, recipe: str, silence: float, how: str, pipe: Connection) -> None:
    """A user's loop; data follow from step and node. `how`: the node, the folder, and whether this rank dies in a save."""
    torch.set_num_threads(1)
    node, folder, end = how.split(" ")
    local = rank % PER_NODE
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore(f"ranks/{node}", store), rank=local, world_size=PER_NODE)
    model = cut(dense(), init_device_mesh("cpu", (PER_NODE,)))
    optimizer = adamw(model)
    warnings.simplefilter("ignore", RuntimeWarning)
    try:
        own = SharedStore(PrefixStore(f"node/{node}", store), local, PER_NODE)
        group = Members(store, None, size, silence, size, NodeRanks(local, PER_NODE, own))
        comm = gossamer.attach(model, optimizer, recipe, group, deadline=60.0)
        resumed = gossamer.checkpoint.resume(comm, folder)
        if end == "dies" and local:
            die_in_the_save(comm)
        began, first = comm.step, flat(model)
        while comm.step < LAST:
            optimizer.zero_grad()
            loss_of(model, comm.present.index(comm.rank), comm.step + 1).backward()
            optimizer.step()
            if comm.step % EVERY == 0:
                gossamer.checkpoint.save(comm, f"{folder}/step{comm.step}", {"size": len(comm.present)})
        last, present = flat(model), comm.present
        comm.finish()
        pipe.send(Outcome(comm.rank, str(resumed), began, first, last, present))
    except (GossamerError, RuntimeError) as error:
        pipe.send(error if isinstance(error, GossamerError) else GossamerError(f"torch: {error}"))


def flat(model: torch.nn.Module) -> list[float]:
    return torch.cat([full(p).reshape(-1) for p in model.parameters()]).tolist()


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_and_save)


def run(
    learners: Callable[..., Learners], recipe: str, folder: Path, nodes: int = 2, dies: bool = False
) -> list[Outcome]:
    """What the ranks of all nodes have seen; where the last node dies, of the others."""
    store = hold()
    crew = learners(nodes * PER_NODE, store.port, recipe, SILENCE)
    for process in range(nodes * PER_NODE):
        node = process // PER_NODE
        crew.start(process, dies=f"{node} {folder} {'dies' if dies and node == nodes - 1 else 'lives'}")
    stay = range((nodes - dies) * PER_NODE)
    outcomes = [crew.hear(process, LONG) for process in stay]
    assert all(isinstance(each, Outcome) for each in outcomes), outcomes
    return sorted(outcomes)  # by rank: the store gives seats to nodes as they come


@pytest.mark.parametrize("recipe", ["topk", pytest.param("local_sgd(4)", marks=pytest.mark.slow)])
def test_all_are_started_again_and_go_on_to_the_bit(
    learners: Callable[..., Learners], recipe: str, tmp_path: Path
) -> None:
    whole = run(learners, recipe, tmp_path)
    (tmp_path / "step10").rename(tmp_path.parent / f"{tmp_path.name}-step10")
    again = run(learners, recipe, tmp_path)
    assert [one.model for one in again] == [one.model for one in whole]
    for one in again:
        assert (one.resumed, one.began) == (f"resumed from {tmp_path}/step{EVERY}", EVERY)
    saved = {p.name for p in (tmp_path / "step10").glob("*.distcp")}
    assert len(saved) == 2 * PER_NODE


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_a_node_dies_in_the_save_and_the_others_write_it_anew(
    learners: Callable[..., Learners], recipe: str, tmp_path: Path
) -> None:
    outcomes = run(learners, recipe, tmp_path, nodes=3, dies=True)
    assert all(len(one.present) == 2 for one in outcomes)
    (tmp_path / "step10").rename(tmp_path.parent / f"{tmp_path.name}-step10")
    again = run(learners, recipe, tmp_path)
    for one in again:
        assert (one.resumed, one.began) == (f"resumed from {tmp_path}/step{EVERY}", EVERY)
    assert [one.model for one in again] == [one.model for one in outcomes]
