"""What a user's process looks like: GPUs are there, and the process group says what backends it has."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tests.gpu import nccl

if TYPE_CHECKING:
    from tests.gpu.loops import Plan

_plan: "Plan | None" = None
_made = 0
CONFIGURATIONS = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}  # of a group without a name: both


def begin(plan: "Plan") -> None:
    """The default group, which is gloo's, says that it has the backends of the plan."""
    global _plan
    _plan = plan
    world: Any = dist.distributed_c10d._world
    group = dist.group.WORLD
    world.pg_map[group] = plan.backends, world.pg_map[group][1]
    world.pg_backend_config[group] = CONFIGURATIONS.get(plan.backends, "cpu:gloo,cuda:nccl")
    if plan.mends:
        _mend_the_first_finding()
    _inject()


def _inject() -> None:
    """Where fabrics make a process group for NCCL, they get the strict one."""
    try:
        fabric_nccl: Any = importlib.import_module("gossamer.fabrics.nccl")
        fabric_nccl.new_group = new_group
    except ImportError:
        _inject_into_the_fabric()


def _inject_into_the_fabric() -> None:
    """Before there was such a place."""
    from gossamer.fabrics.channel import Channel
    from gossamer.fabrics.torch import TorchFabric

    real: Any = TorchFabric._make_channel

    def make(fabric: Any, meet: Any) -> Any:
        assert _plan is not None
        if _plan.backends == "gloo" or fabric.size == 1:
            return real(fabric, meet)
        here = torch.device("cuda", torch.cuda.current_device())
        group = new_group(range(fabric.size), fabric.size, fabric._deadline, here)
        return Channel(group, fabric.rank, fabric.size, here if _plan.backends == "nccl" else torch.device("cpu"))

    TorchFabric._make_channel = make


def new_group(ranks: Sequence[int], size: int, deadline: float, device: torch.device) -> nccl.StrictGroup:
    """Stands for fabrics.nccl.new_group."""
    global _made
    from tests.gpu.loops import PATIENCE

    assert _plan is not None
    _made += 1
    store = dist.distributed_c10d._get_default_store()
    return nccl.StrictGroup(store, f"group {_made}", dist.get_rank(), size, device, _plan.eager, PATIENCE)


def _mend_the_first_finding() -> None:
    """`types.GeneratorType[...]` is an error before Python 3.13: mended here, to see what lies behind it."""
    from gossamer.fabrics import stream

    if not hasattr(stream.GeneratorType, "__class_getitem__"):
        stream.GeneratorType = type("GeneratorType", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
