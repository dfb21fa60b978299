"""Groups: the process group and the nodes in the arguments of a front door."""

import os
import warnings
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gossamer.core.errors import AttachError
from gossamer.fabrics.liveness.launch import environment_number
from gossamer.fabrics.liveness.members import Members
from gossamer.fabrics.torch.endpoint import ONE_STORE
from gossamer.fabrics.torch.fabric import TorchFabric
from gossamer.fabrics.torch.nccl import machine
from gossamer.integrations.handshake import tell
from gossamer.recipe import Recipe
from gossamer.two_levels import in_two_levels

Where = int | Literal["hosts", "members"] | DeviceMesh
NEIGHBOURS = "number the ranks node by node, as torchrun does, with the same number on each node"

Given = dist.ProcessGroup | DeviceMesh | Members | None


def group_of(given: Given) -> dist.ProcessGroup | Members | None:
    """Return the group; None stands for the default group, or for this process alone."""
    if isinstance(given, Members):
        return given
    _warn_of_one_store()
    if given is None:
        alone = not dist.is_initialized()
        if alone and (environment_number("WORLD_SIZE") or 1) > 1:
            raise AttachError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no process group exists and this rank would train alone; "
                "call torch.distributed.init_process_group() first"
            )
        return None
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise AttachError(
                f"process_group is a DeviceMesh of {given.ndim} dimensions: pick one dimension, such as mesh['data']"
            )
        return given.get_group()
    if not isinstance(given, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise AttachError(
            "process_group is not a group: this process is not one of its ranks; call attach on the ranks of the group only"
        )
    return given


def _warn_of_one_store() -> None:
    """Warn before the first restart: torchrun keeps its store for all attempts, and lends it to ranks that expect a new one."""
    lent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("RANK") == "0"
    if lent and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        warnings.warn(
            "torchrun may start the ranks again, but they share its store in all attempts, and would then find the addresses of "
            f"dead processes. {ONE_STORE}",
            stacklevel=4,
        )


def host_names(fabric: TorchFabric) -> list[str]:
    """Return the host name of each rank. All ranks call it, before any of them can refuse its arguments."""
    return [machine()] if fabric.size == 1 else fabric.run(tell(machine(), fabric.device), "attach")


def between_nodes(
    recipe: Recipe, nodes: Where | None, hosts: list[str], size: int, group: "dist.ProcessGroup | Members | None"
) -> Recipe:
    """Return the recipe in two levels if `nodes` is given: dense inside a node, the recipe between nodes."""
    return recipe if nodes is None else in_two_levels(recipe, ranks_per_node(nodes, hosts, size, group))


def ranks_per_node(nodes: Where, hosts: list[str], size: int, group: "dist.ProcessGroup | Members | None") -> int:
    """Return the number of ranks per node, from a number of nodes, the host names, the members, or the rows of a mesh."""
    if isinstance(group, Members):
        return group.node.size
    if nodes == "members":
        raise AttachError("nodes='members' is for gossamer.members(): give nodes='hosts', or the number of nodes")
    if isinstance(nodes, DeviceMesh):
        return _of_mesh(nodes, size, group)
    if nodes == "hosts":
        return _of_hosts(hosts)
    if type(nodes) is not int:
        raise AttachError(
            f"nodes must be a number of nodes, 'hosts', 'members', or a DeviceMesh of nodes and their ranks, got {nodes!r}"
        )
    if nodes < 1 or size % nodes:
        raise AttachError(
            f"nodes={nodes} does not divide {size} ranks into equal nodes; pass a number that divides {size}, or set the ranks per "
            "node in the recipe, where the last node may have fewer: qsgd + per_node(4)"
        )
    return size // nodes


def _of_hosts(names: list[str]) -> int:
    """Return the ranks per node; an error if ranks of a host are not neighbours.

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
            + f". {NEIGHBOURS.capitalize()}; only the last node may have fewer"
        )
    return per_node


def _of_mesh(mesh: DeviceMesh, size: int, group: "dist.ProcessGroup | None") -> int:
    if mesh.ndim != 2:
        raise AttachError(
            f"nodes is a DeviceMesh of {mesh.ndim} dimension(s); pass one with two: nodes, and the ranks of each node"
        )
    ranks = list(range(size)) if group is None else dist.get_process_group_ranks(group)
    if mesh.mesh.flatten().tolist() != ranks:
        raise AttachError(
            f"nodes is a DeviceMesh of the ranks {mesh.mesh.tolist()}, but the ranks of the group are {ranks}, in this order; {NEIGHBOURS}"
        )
    return mesh.size(1)
