"""Nodes: which ranks share one, by what a user says of them."""

from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gossamer.core.errors import AttachError
from gossamer.fabrics.nccl import machine
from gossamer.fabrics.torch import TorchFabric
from gossamer.integrations.handshake import tell
from gossamer.recipe import Recipe
from gossamer.two_levels import in_two_levels

Where = int | Literal["hosts"] | DeviceMesh

NEIGHBOURS = "number the ranks node by node, as torchrun does, equally many on each"


def host_names(fabric: TorchFabric) -> list[str]:
    """What each rank's machine is called. All ranks ask, before any of them can refuse anything."""
    return [machine()] if fabric.size == 1 else fabric.run(tell(machine(), fabric.device), "attach")


def between_nodes(
    recipe: Recipe, nodes: Where | None, hosts: list[str], size: int, group: "dist.ProcessGroup | None"
) -> Recipe:
    """The recipe as it goes between nodes, where any are spoken of."""
    return recipe if nodes is None else in_two_levels(recipe, ranks_per_node(nodes, hosts, size, group))


def ranks_per_node(nodes: Where, hosts: list[str], size: int, group: "dist.ProcessGroup | None") -> int:
    """How many ranks a node has: of so many nodes, of hosts as they call themselves, or of the rows of a mesh."""
    if isinstance(nodes, DeviceMesh):
        return _of_mesh(nodes, size, group)
    if nodes == "hosts":
        return _of_hosts(hosts)
    if type(nodes) is not int:
        raise AttachError(
            f"nodes is a number of nodes, 'hosts', or a DeviceMesh of nodes and their ranks, not {nodes!r}"
        )
    if nodes < 1 or size % nodes:
        raise AttachError(
            f"nodes={nodes}: {size} ranks are not equally many on each; take a number that divides {size}, or say in the "
            "recipe how many ranks a node has, the last one perhaps fewer: qsgd + per_node(4)"
        )
    return size // nodes


def _of_hosts(names: list[str]) -> int:
    """
    >>> _of_hosts(["a", "a", "b", "b"]), _of_hosts(["a", "a", "b"])
    (2, 2)
    """
    per_node = names.count(names[0])
    firsts = names[::per_node]
    if any(name != firsts[i // per_node] for i, name in enumerate(names)) or len(set(firsts)) < len(firsts):
        held = {name: [i for i, n in enumerate(names) if n == name] for name in names}
        raise AttachError(
            "nodes='hosts': "
            + "; ".join(f"rank(s) {', '.join(map(str, ranks))} on {name}" for name, ranks in held.items())
            + f". {NEIGHBOURS.capitalize()}; only the last may have fewer"
        )
    return per_node


def _of_mesh(mesh: DeviceMesh, size: int, group: "dist.ProcessGroup | None") -> int:
    if mesh.ndim != 2:
        raise AttachError(
            f"nodes is a DeviceMesh of {mesh.ndim} dimension(s); it takes two: nodes, and the ranks of each"
        )
    ranks = list(range(size)) if group is None else dist.get_process_group_ranks(group)
    if mesh.mesh.flatten().tolist() != ranks:
        raise AttachError(
            f"nodes is a DeviceMesh of the ranks {mesh.mesh.tolist()}, and those that train are {ranks}, in this order; {NEIGHBOURS}"
        )
    return mesh.size(1)
