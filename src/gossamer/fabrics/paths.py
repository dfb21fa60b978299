"""Chooses the path of a comm thread's tensors, from their device and the group's backend for that device."""

from typing import Literal

import torch
import torch.distributed as dist

from gossamer.core.errors import AttachError
from gossamer.fabrics.members import Members

Path = Literal["alone", "gloo", "nccl", "staged"]


def path(group: dist.ProcessGroup | Members | None, size: int, device: torch.device) -> Path:
    """The path for a group's tensors on a device.

    The group's backend name does not suffice: a group may have several backends, and the name "undefined".
    """
    if group is None or size == 1:
        return "alone"
    if isinstance(group, Members):
        return "gloo" if device.type == "cpu" else "staged"
    has = backends(group)
    if device.type == "cpu" and has.get("cpu") == "gloo":
        return "gloo"
    if device.type == "cuda" and has.get("cuda") == "nccl":
        return "nccl"
    if device.type == "cuda" and "gloo" in has.values():
        return "staged"
    raise AttachError(
        f"the model is on {device}, and the process group has no backend that gossamer can use there (it has "
        f"{', '.join(f'{b} for {d}' for d, b in has.items()) or 'none'}): call torch.distributed.init_process_group"
        f"('{'cpu:gloo,cuda:nccl' if device.type == 'cuda' else 'gloo'}'), or give "
        "process_group=torch.distributed.new_group(backend='gloo')"
    )


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The backend name of each device type.

    >>> _read("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return _read(dist.get_backend_config(group))


def _read(configuration: str) -> dict[str, str]:
    pairs = (entry.partition(":") for entry in configuration.split(","))
    return {device: backend for device, _, backend in pairs if backend}
