"""The interface of a connection, which answers a comm thread's network requests. There are three.

`gloo` is for tensors on the CPU, `nccl` for tensors on a GPU, `staged` for tensors on a GPU that travel over gloo.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.core.verbs import AllGather, AllReduce, AllToAll, Receive, ReduceOp, Send, Verb
from gossamer.core.wire import LazyWire, Read, receive_order

_OPS: dict[ReduceOp, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# Types that both gloo and NCCL add up; gloo also takes bool, but leaves values in it that are not booleans.
_FLOATS = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
_SUMMABLE = _FLOATS | {torch.int32, torch.int64, torch.uint8, torch.int8}

Crossing = AllReduce | AllGather | AllToAll | Send | Receive


class Connection(Protocol):
    """Answers requests one after the other, on the comm thread."""

    rank: int
    size: int

    def answer(self, verb: Crossing) -> Any: ...

    def look(self) -> None:
        """Raise an error if another rank's connection has ended, without waiting. NCCL cannot tell."""

    def tear(self) -> None:
        """End all waits on this connection with an error, from any thread. It cannot be used any more."""

    def hang_up(self, patience: float) -> None:
        """Close it, while no request is under way; peers that wait for this rank fail. Sends get `patience` seconds."""


def all_reduce(group: Any, tensor: Tensor, op: ReduceOp, timeout: timedelta | None = None) -> Tensor:
    """Reduce a tensor in place, over a backend's own group."""
    flat = tensor.contiguous()
    options = dist.AllreduceOptions()
    options.reduceOp = _OPS[op]
    if timeout is not None:
        options.timeout = timeout
    group.allreduce([flat], options).wait()
    if flat is not tensor:
        tensor.copy_(flat)
    return tensor


def read_all(wires: Sequence[Tensor], read: Read, rank: int) -> list[Tensor]:
    for j in receive_order(rank, len(wires)):
        read(j, wires[j])
    return []


def refuse(verb: Verb, size: int, rank: int, device: torch.device) -> None:
    """Raise an error for a request that a backend would answer by hanging, by aborting, or with wrong numbers."""
    match verb:
        case AllReduce(tensor) | AllGather(tensor) | Send(_, tensor) if tensor.device != device:
            raise ValueError(
                f"{type(verb).__name__} of a tensor on {tensor.device}, but the comm thread takes tensors on {device}"
            )
        case AllReduce(tensor, _) if tensor.dtype not in _SUMMABLE:
            raise TypeError(
                f"no backend can reduce {tensor.dtype}; convert the tensor, for instance to int32 or float32"
            )
        case AllGather(wire) | Send(_, wire):
            _expect_wire(wire)
        case AllToAll(wires, lengths):
            if not len(wires) == len(lengths) == size:
                raise ValueError(f"AllToAll with {len(wires)} wires and {len(lengths)} lengths for {size} ranks")
            if wires[rank].numel() != lengths[rank]:
                raise ValueError(
                    f"AllToAll expects {lengths[rank]} bytes from its own wire, which has {wires[rank].numel()}"
                )
            for wire in wires:
                if isinstance(wire, Tensor):
                    _expect_wire(wire)
        case _:
            pass
    peer = verb.to if isinstance(verb, Send) else verb.source if isinstance(verb, Receive) else 0
    if peer is not None and peer >= size:
        raise ValueError(f"{type(verb).__name__} with rank {peer}, but there are {size} ranks, counted from 0")


def made(wire: Tensor | LazyWire) -> Tensor:
    if isinstance(wire, LazyWire):
        wire = wire.keep()
        _expect_wire(wire)
    return wire


def _expect_wire(wire: Tensor) -> None:
    if wire.dtype != torch.uint8 or wire.dim() != 1:
        raise TypeError(f"a wire must be a 1-D uint8 tensor, got {wire.dtype} of shape {tuple(wire.shape)}")
