"""What a user's process looks like: GPUs are there, and the process group says what backends it has."""

import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tests.gpu import device, nccl

if TYPE_CHECKING:
    from tests.gpu.loops import Plan

_installed = False
_plan: "Plan | None" = None
_made = 0


def believe_in_gpus(rank: int) -> None:
    """Once in each process."""
    global _installed
    if not _installed:
        _installed = True
        device.install()
        _mend_the_first_finding()
        _inject()


@contextlib.contextmanager
def group_of(plan: "Plan", rank: int) -> Generator[None]:
    """The default group, which is gloo's, says that it has the backends of the plan."""
    global _plan
    _plan = plan
    world: Any = dist.distributed_c10d._world
    group = dist.group.WORLD
    name, store = world.pg_map[group]
    configuration = world.pg_backend_config[group]
    devices, get = dist.ProcessGroup._device_types, dist.ProcessGroup._get_backend
    world.pg_map[group] = plan.backends, store
    world.pg_backend_config[group] = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}.get(
        plan.backends, "cpu:gloo,cuda:nccl"
    )
    try:
        yield
    finally:
        world.pg_map[group], world.pg_backend_config[group] = (name, store), configuration


def _inject() -> None:
    """Where fabrics make a process group for NCCL, they get the strict one."""
    from gossamer.fabrics.channel import Channel
    from gossamer.fabrics.torch import TorchFabric

    real: Any = TorchFabric._make_channel

    def make(fabric: Any, meet: Any) -> Any:
        if _plan is None or _plan.backends == "gloo" or fabric.size == 1:
            return real(fabric, meet)
        here = torch.device("cuda", torch.cuda.current_device())
        named = _plan.backends == "nccl"
        group = new_group(range(fabric.size), fabric.size, fabric._deadline, here)
        return Channel(group, fabric.rank, fabric.size, here if named else torch.device("cpu"))

    TorchFabric._make_channel = make


def new_group(ranks: Any, size: int, deadline: float, here: torch.device) -> nccl.StrictGroup:
    global _made
    from tests.gpu.loops import PATIENCE

    assert _plan is not None
    _made += 1
    store = dist.distributed_c10d._get_default_store()
    return nccl.StrictGroup(store, f"group {_made}", dist.get_rank(), size, here, _plan.eager, PATIENCE)


def _mend_the_first_finding() -> None:
    """`types.GeneratorType[...]` is an error before Python 3.13: mended here, to see what lies behind it."""
    from gossamer.fabrics import stream

    if not hasattr(stream.GeneratorType, "__class_getitem__"):
        stream.GeneratorType = type("GeneratorType", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
