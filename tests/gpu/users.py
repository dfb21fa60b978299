"""What a user's process looks like: GPUs are there, and the process group says what backends it has."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.gpu import nccl

from gossamer.fabrics.torch import nccl as fabric_nccl

if TYPE_CHECKING:
    from tests.gpu.loops import Plan

_plan: "Plan | None" = None
_made = Counter[tuple[int, ...]]()  # groups of these ranks so far; all of them make theirs, and nobody else
CONFIGURATIONS = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}  # of a group without a name: both


def begin(plan: "Plan") -> None:
    """The default group, which is gloo's, says that it has the backends of the plan."""
    global _plan
    _plan = plan
    call_it(dist.group.WORLD, plan.backends)
    fabric_nccl.new_group = new_group


def new_group(ranks: Sequence[int], size: int, deadline: float, device: torch.device) -> nccl.StrictGroup:
    """Stands for fabrics.nccl.new_group."""
    from tests.gpu.loops import PATIENCE

    assert _plan is not None
    members = tuple(ranks)
    _made[members] += 1
    store = dist.distributed_c10d._get_default_store()
    name, rank = f"group {_made[members]} of {members}", members.index(dist.get_rank())
    return nccl.StrictGroup(store, name, rank, size, device, _plan.eager, PATIENCE)


def call_it(group: dist.ProcessGroup | None, backends: str) -> None:
    """Let a group, which is gloo's, say that it has these backends."""
    world: Any = dist.distributed_c10d._world
    world.pg_map[group] = backends, world.pg_map[group][1]
    world.pg_backend_config[group] = CONFIGURATIONS.get(backends, "cpu:gloo,cuda:nccl")
