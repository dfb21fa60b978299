"""Nodes whose two ranks hold the shards of one model come and go as members: all shards of a node are of one step."""

import random
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.gang import Gang
from tests.integrations.last_step import LastStep, end_with
from tests.integrations.loops import DEADLINE, SEED
from tests.integrations.sharded import adamw, cut, dense, full, loss_of
from tests.integrations.test_fsdp import STEPS, over_shards
from tests.integrations.test_members import Learners, hold, made_by
from tests.integrations.test_node_recipes import FAR, PER_NODE, SILENCE, Fleet, members
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh

import gossamer
from gossamer.core.errors import AttachError, GossamerError
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.liveness.node import NodeRanks

pytestmark = [
    pytest.mark.gang,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 trains on processors since torch 2.13"),
]


class Outcome(NamedTuple):
    """What a rank has seen."""

    model: list[float]
    present: tuple[int, ...]
    told: list[str]
    optimizer: list[float]
    dropped: list[int]


def learn_a_shard(rank: int, size: int, port: int, recipe: str, silence: float, node: str, pipe: Connection) -> None:
    """A user's loop, until the test lets it end."""
    torch.set_num_threads(1)
    local = rank % PER_NODE
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore(f"ranks/{node}", store), rank=local, world_size=PER_NODE)
    group = members(port, node, local)
    model = cut(dense(), init_device_mesh("cpu", (PER_NODE,)))
    optimizer = adamw(model)
    draw = torch.Generator().manual_seed(sum(node.encode()) * PER_NODE + local)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = gossamer.attach(model, optimizer, recipe, group, deadline=30.0)
            end = LastStep(comm, group.store, None if local else comm.rank)
            pipe.send((comm.rank, comm.step))
            while not end.is_over():
                x = torch.randn(4, 6, generator=draw)
                optimizer.zero_grad()
                (model(x) - x[:, :3]).square().mean().backward()
                optimizer.step()
                if comm.step == FAR:
                    group.store.raise_flag(f"far/{comm.rank}", "")
                time.sleep(0.005)
            comm.check_sync()
            moments = [float(full(optimizer.state[p]["exp_avg"]).double().sum()) for p in model.parameters()]
            dropped = comm.dropped
            comm.finish()
            told = [str(w.message) for w in caught if w.category is RuntimeWarning]
        flat = torch.cat([full(p).reshape(-1) for p in model.parameters()])
        pipe.send(Outcome(flat.tolist(), comm.present, told, moments, dropped))
    except (GossamerError, RuntimeError) as error:
        pipe.send(error if isinstance(error, GossamerError) else GossamerError(f"torch: {error}"))


@pytest.fixture
def learners() -> Iterator[Callable[..., Learners]]:
    yield from made_by(loop=learn_a_shard)


def ends(fleet: Fleet) -> list[Outcome]:
    end_with(fleet.members.store, fleet.all.size // PER_NODE)
    outcomes = [fleet.all.hear(process) for process in range(fleet.all.size)]
    assert all(isinstance(each, Outcome) for each in outcomes), outcomes
    return outcomes


AT_EVERY_STEP = ["qsgd", "topk", "powersgd", "allreduce"]
ROUNDS = ["local_sgd(4)", "slowmo(4)"]
QUICK = ["topk"]


@pytest.mark.parametrize(
    "recipe",
    [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in (*AT_EVERY_STEP, *ROUNDS)],
)
def test_a_node_of_shards_is_killed_and_comes_back(learners: Callable[..., Learners], recipe: str) -> None:
    fleet = Fleet(learners, recipe)
    assert isinstance(fleet.lose(1, local=0, sees=(0,)), GossamerError)
    fleet.start(1)
    came = fleet.hear(1)
    assert came >= FAR
    outcomes = ends(fleet)
    for process, one in enumerate(outcomes):
        local = process % PER_NODE
        assert one.present == (local, PER_NODE + local)
        assert one.model == outcomes[0].model
        assert len(one.dropped) <= 2
        assert recipe not in AT_EVERY_STEP or one.optimizer == outcomes[0].optimizer
    assert outcomes[fleet.processes(0)[0]].dropped == outcomes[fleet.processes(0)[1]].dropped


def take_four_steps(rank: int, size: int, port: int, recipe: str, silence: float, node: str, pipe: Connection) -> None:
    """The loop of `test_fsdp.py`, as a member."""
    torch.set_num_threads(1)
    local = rank % PER_NODE
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore(f"ranks/{node}", store), rank=local, world_size=PER_NODE)
    model = cut(dense(), init_device_mesh("cpu", (PER_NODE,)))
    optimizer = adamw(model)
    with gossamer.attach(model, optimizer, recipe, members(port, node, local), seed=SEED, deadline=DEADLINE) as comm:
        out, number = list[list[float]](), comm.present.index(comm.rank)
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss_of(model, number, step).backward()
            optimizer.step()
            out.append(torch.cat([full(p).reshape(-1) for p in model.parameters()]).tolist())
    pipe.send(out)


@pytest.mark.parametrize("recipe", ["allreduce", pytest.param("qsgd", marks=pytest.mark.slow)])
def test_a_run_in_which_no_node_is_lost_is_bit_equal_to_one_without_members(gang4: Gang, recipe: str) -> None:
    wanted = [each.tolist() for each in gang4.run(over_shards, recipe, "adamw", {})[0]]
    store = hold()
    for made in made_by(loop=take_four_steps):
        crew = made(2 * PER_NODE, store.port, recipe, SILENCE)
        for process in range(2 * PER_NODE):
            crew.start(process, dies=str(process // PER_NODE))
        assert [crew.hear(process) for process in range(2 * PER_NODE)] == [wanted] * 2 * PER_NODE


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["topk", "local_sgd(4)"])
def test_nodes_of_shards_killed_at_random_moments_leave_the_others_at_work(
    learners: Callable[..., Learners], recipe: str
) -> None:
    fleet = Fleet(learners, recipe, nodes=3)
    fleet.is_hit(4, random.Random(recipe))
    outcomes = ends(fleet)
    assert all(one.model == outcomes[0].model for one in outcomes)


def refused(rank: int, size: int) -> list[str]:
    """What each attach says that cannot be."""
    flat, squares = init_device_mesh("cpu", (size,)), init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    said = list[str]()
    for mesh, local, per_node, recipe, how in (
        (squares, rank, size, "topk", {}),
        (flat, rank, size + 1, "topk", {}),
        (flat, rank, size, "topk", {"nodes": "members"}),
        (flat, rank, size, "sgp", {}),
        (flat, rank, size, "backup(1)", {}),
        (flat, rank, size, "decoupled_diloco(4)", {}),
    ):
        model = cut(dense(), mesh)
        group = Members(HashStore(), None, 2 * per_node, node=NodeRanks(local, per_node))
        options: dict[str, Any] = how
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, adamw(model), recipe, group, **options)
        said.append(str(caught.value))
    return said


def test_what_shards_of_members_cannot_do_is_refused_by_name(gang2: Gang) -> None:
    for said in gang2.run(refused):
        assert "mesh of two dimensions" in said[0]
        assert "over 2 rank(s), and a member here is a node of 3" in said[1]
        assert "leave nodes out" in said[2]
        assert "gossip outlives a lost node by an average of all models" in said[3]
        assert "cannot go on without a lost rank" in said[4]
        assert "decide for itself when to answer a round" in said[5]
