"""Python's side of the device: tensors that are made there, moves between devices, and reads by the host."""

from collections.abc import Callable
from typing import Any

import torch
from tests.gpu.clocks import current_stream, host_waits_for, index_of
from tests.gpu.tensors import Cuda, Host, to_device
from torch import Tensor
from torch.overrides import TorchFunctionMode

FROM_HOST_DATA = ("tensor", "as_tensor", "asarray")


class Rules(TorchFunctionMode):
    """In force on every thread: CUDA tensors come into being here, since this torch cannot make them."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if args and isinstance(args[0], Tensor):
            if name == "to":
                return _to(func, args, kwargs)
            if name == "cuda":
                return _move(args[0], torch.device("cuda", index_of(args[1] if len(args) > 1 else None)))
            if name == "pin_memory":
                return Host(args[0].detach().clone())
            if isinstance(args[0], Cuda):
                if name in ("cpu", "tolist"):
                    return getattr(args[0], name)()
                if name in ("numpy", "__array__", "data_ptr"):
                    raise TypeError(f"{name}() of a {args[0].device} tensor; use Tensor.cpu() first")
        device = kwargs.get("device")
        if not _is_cuda(device):
            return func(*args, **kwargs)
        kwargs["device"] = torch.device("cpu")
        made = func(*args, **kwargs)
        if not isinstance(made, Tensor) or isinstance(made, Cuda):
            return made
        if name in FROM_HOST_DATA:
            host_waits_for(current_stream(device), f"torch.{name} of host data")
        return to_device(made, index_of(device))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str | torch.device):
        return torch.device(device).type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _to(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Tensor.to in all its ways: a device, a type, both, or another tensor's."""
    x = args[0]
    device, dtype, copy = kwargs.get("device"), kwargs.get("dtype"), kwargs.get("copy", False)
    non_blocking = kwargs.get("non_blocking", False)
    for given in args[1:]:
        if isinstance(given, Tensor):
            device, dtype = given.device, given.dtype
        elif isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, str | torch.device) or (isinstance(given, int) and not isinstance(given, bool)):
            device = given
    if device is None:
        return func(*args, **kwargs)
    target = torch.device("cuda", index_of(device)) if _is_cuda(device) else torch.device(device)
    y = x if dtype is None or dtype == x.dtype else x.to(dtype)
    moved = _move(y, target, non_blocking)
    return moved.clone() if copy and moved is x else moved


def _move(x: Tensor, target: torch.device, non_blocking: bool = False) -> Tensor:
    here = torch.device("cuda", x.index) if isinstance(x, Cuda) else torch.device("cpu")
    if here == target:
        return x
    if target.type == "cpu":
        assert isinstance(x, Cuda)
        return x.cpu()
    if isinstance(x, Cuda):
        return to_device(x.inner.detach().clone(), target.index)
    made = to_device(torch.empty_like(x.detach()), target.index)
    with torch.no_grad():
        made.copy_(x, non_blocking=non_blocking)
    return made
