"""Several ranks a node, as a user sees them: one argument of `attach`, or a recipe that says so."""

import os
from typing import Any

import pytest
import torch
from tests.gang import Gang
from tests.integrations.loops import SMALL, Awkward, attached, flat, loss_of, same, sgd, simulated, small_step
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.core.errors import AttachError, GossamerError
from gossamer.planning import bytes_between, bytes_per_step
from gossamer.recipe import Recipe
from gossamer.two_levels import in_two_levels

pytestmark = pytest.mark.gang

IN_TWO = "nodes(scatter(qsgd(bits=4, bucket=16)), 2)" + SMALL
FLAT = "scatter(qsgd(bits=4, bucket=16))" + SMALL
LOW_RANK = "allreduce(powersgd(rank=1)) + error_feedback()"


def trained(rank: int, size: int, how: str) -> tuple[str, torch.Tensor, int, int]:
    """Five steps on two nodes of two ranks; what the steps sent, and how much of that left the node."""
    os.environ["NCCL_HOSTID"] = f"host {rank // 2}"
    nodes: Any = {"number": 2, "hosts": "hosts", "mesh": None, "recipe": None}[how]
    if how == "mesh":
        nodes = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    with attached(IN_TWO if how == "recipe" else FLAT, **({} if nodes is None else {"nodes": nodes})) as taken:
        model, optimizer, comm = taken
        sent, inside = comm.ledger.sent, comm.ledger.inside
        for _ in range(5):
            small_step(model, optimizer, comm, rank)
        sent, inside = comm.ledger.sent - sent, comm.ledger.inside - inside
        comm.check_sync()
    return repr(comm.recipe), flat(model), sent, inside


@pytest.mark.parametrize("how", ["number", "hosts", "mesh", "recipe"])
def test_two_nodes_train_as_on_the_simulator_and_send_what_is_counted(gang4: Gang, how: str) -> None:
    real, virtual = gang4.run(trained, how), simulated(IN_TWO, 4, 5)
    assert {recipe for recipe, *_ in real} == {repr(Recipe.of(IN_TWO))}
    for rank in range(4):
        assert same(real[rank][1], virtual[rank][-1])
    shapes = {n: tuple(p.shape) for n, p in Awkward().named_parameters()}
    sent, inside = (sum(r[i] for r in real) for i in (2, 3))
    assert sent == 5 * 4 * bytes_per_step(IN_TWO, shapes, 4)
    assert sent - inside == 5 * 2 * bytes_between(IN_TWO, shapes, 4, 2)


def adding_up(rank: int, size: int) -> tuple[torch.Tensor, int, int]:
    with attached(LOW_RANK, nodes=2) as (model, optimizer, comm):
        sent, inside = comm.ledger.sent, comm.ledger.inside
        for _ in range(5):
            small_step(model, optimizer, comm, rank)
        sent, inside = comm.ledger.sent - sent, comm.ledger.inside - inside
        comm.check_sync()
        return flat(model), sent, inside


def test_low_rank_messages_are_summed_inside_and_then_between(gang4: Gang) -> None:
    real, virtual = gang4.run(adding_up), simulated(LOW_RANK + " + per_node(2)", 4, 5)
    shapes = {n: tuple(p.shape) for n, p in Awkward().named_parameters()}
    for rank in range(4):
        torch.testing.assert_close(real[rank][0], virtual[rank][-1], rtol=1e-5, atol=1e-6)
    between = sum(sent - inside for _, sent, inside in real)
    assert between == 5 * 2 * bytes_between(LOW_RANK + " + per_node(2)", shapes, 4, 2)


def by_name(rank: int, size: int, hosts: list[str]) -> str:
    os.environ["NCCL_HOSTID"] = hosts[rank]
    with attached(FLAT, nodes="hosts") as (model, optimizer, comm):
        for _ in range(2):
            small_step(model, optimizer, comm, rank)
        comm.check_sync()
        return repr(comm.recipe)


def test_the_last_host_may_have_fewer_ranks(gang4: Gang) -> None:
    three = repr(Recipe.of(IN_TWO.replace(", 2)", ", 3)")))
    assert gang4.run(by_name, list("aaab")) == [three] * 4


def refused(rank: int, size: int, hosts: list[str], nodes: Any, recipe: str) -> str:
    os.environ["NCCL_HOSTID"] = hosts[rank]
    model = Awkward()
    with pytest.raises(GossamerError) as caught:
        gossamer.attach(model, sgd(model), recipe, nodes=nodes, deadline=20.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("hosts", "nodes", "recipe", "why"),
    [
        ("abbb", "hosts", "qsgd", r"rank\(s\) 0 on a; rank\(s\) 1, 2, 3 on b\. Number the ranks node by node"),
        ("abab", "hosts", "qsgd", r"rank\(s\) 0, 2 on a; rank\(s\) 1, 3 on b"),
        ("abca", "hosts", "qsgd", "same number on each node; only the last node may have fewer"),
        ("aabb", 3, "qsgd", "nodes=3 does not divide 4 ranks into equal nodes; pass a number that divides 4"),
        ("aabb", 0, "qsgd", "nodes=0 does not divide 4 ranks"),
        ("aabb", True, "qsgd", "a number of nodes, 'hosts', 'members', or a DeviceMesh"),
        ("aabb", "host", "qsgd", "a number of nodes, 'hosts', 'members', or a DeviceMesh"),
        ("aabb", "hosts", "nodes(scatter(qsgd()), 4)", "is for nodes of 4 ranks, and here nodes have 2"),
        ("aabb", "hosts", "no such recipe", "cannot be read"),
    ],
)
def test_nodes_that_are_unlike_are_refused_on_all_ranks(
    gang4: Gang, hosts: str, nodes: Any, recipe: str, why: str
) -> None:
    import re

    for text in gang4.run(refused, list(hosts), nodes, recipe):
        assert re.search(why, text), text


def meshes(rank: int, size: int) -> list[str]:
    model, said = Awkward(), list[str]()
    for mesh in (torch.arange(4), torch.tensor([[0, 2], [1, 3]])):
        with pytest.raises(AttachError) as caught:
            gossamer.attach(model, sgd(model), "qsgd", nodes=DeviceMesh("cpu", mesh), deadline=20.0)
        said.append(str(caught.value))
    return said


def test_a_mesh_is_of_nodes_and_their_ranks_in_the_order_of_training(gang4: Gang) -> None:
    for flat_one, crossed in gang4.run(meshes):
        assert "a DeviceMesh of 1 dimension(s); pass one with two" in flat_one
        assert "a DeviceMesh of the ranks [[0, 2], [1, 3]], but the ranks of the group are [0, 1, 2, 3]" in crossed


def hooked(rank: int, size: int, nodes: int | None) -> torch.Tensor:
    """The same recipe as a communication hook."""
    model = Awkward()
    ddp = DistributedDataParallel(model, find_unused_parameters=False)
    with pytest.raises(GossamerError, match="nodes=3 does not divide 4 ranks"):
        gossamer.ddp.register(ddp, FLAT, nodes=3, deadline=20.0)
    hook = gossamer.ddp.register(ddp, IN_TWO if nodes is None else FLAT, nodes=nodes, deadline=20.0)
    optimizer = sgd(model)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
    hook.check_sync()
    groups = {e.among for e in hook.ledger if e.among is not None}
    hook.close()
    assert groups == {(2 * (rank // 2), 2 * (rank // 2) + 1)} | ({(0, 2)} if rank % 2 == 0 else set())
    return flat(model)


def test_it_is_a_hook_of_ddp_too(gang4: Gang) -> None:
    got = [*gang4.run(hooked, None), *gang4.run(hooked, 2)]
    assert all(same(got[0], other) for other in got)


def test_every_exchange_of_a_recipe_goes_between_nodes() -> None:
    both = Recipe.of(
        "gather(topk(ratio=0.9)) + error_feedback() + accordion(gather(topk(ratio=0.9)), gather(topk(ratio=0.1)), 2)"
    )
    two = in_two_levels(both, 2)
    assert repr(two) == (
        "nodes(gather(topk(ratio=0.9)), 2) + error_feedback() + "
        "accordion(nodes(gather(topk(ratio=0.9)), 2), nodes(gather(topk(ratio=0.1)), 2), 2)"
    )
    assert in_two_levels(two, 2) == two
    assert in_two_levels(both, 1) == both
