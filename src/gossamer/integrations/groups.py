"""Groups: find the process group in the arguments of `attach`."""

import os

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gossamer.core.errors import AttachError
from gossamer.fabrics.members import Members

Given = dist.ProcessGroup | DeviceMesh | Members | None


def group_of(given: Given) -> dist.ProcessGroup | Members | None:
    """Return the group; None stands for the default group, or for this process alone."""
    if isinstance(given, Members):
        return given
    if given is None:
        alone = not dist.is_initialized()
        if alone and int(os.environ.get("WORLD_SIZE") or 1) > 1:
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
